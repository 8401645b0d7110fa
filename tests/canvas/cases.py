"""The integration tests of Celery's canvas, `t/integration/test_canvas.py`, and why some have no counterpart.

A case is `<class>.<test>`, without the prefixes `Test`, `test_`.
"""

from __future__ import annotations

_NAMES = """
link_error.link_error_eager link_error.link_error link_error.link_error_callback_error_callback_retries_eager
link_error.link_error_callback_retries link_error.link_error_using_signature_eager
link_error.link_error_using_signature
chain.simple_chain chain.single_chain chain.complex_chain chain.group_results_in_chain
chain.chain_of_chain_with_a_single_task chain.chain_on_error chain.chain_inside_group_receives_arguments
chain.eager_chain_inside_task chain.group_chord_group_chain chain.group_result_not_has_cache
chain.second_order_replace chain.parent_ids chain.chord_soft_timeout_recuperation
chain.chain_error_handler_with_eta chain.groupresult_serialization chain.chain_of_task_a_group_and_a_chord
chain.chain_of_chords_as_groups_chained_to_a_task_with_two_tasks chain.chain_of_chords_with_two_tasks
chain.chain_of_explicit_chords chain.chain_of_nine_chords chain.chain_of_a_chord_and_a_group_with_two_tasks
chain.chain_of_a_chord_and_a_task_and_a_group chain.chain_of_a_chord_and_two_tasks_and_a_group
chain.chain_of_a_chord_and_three_tasks_and_a_group chain.nested_chain_group_lone chain.nested_chain_group_mid
chain.nested_chain_group_last chain.chain_replaced_with_a_chain_and_a_callback
chain.chain_replaced_with_a_chain_and_an_error_callback chain.chain_with_cb_replaced_with_chain_with_cb
chain.chain_flattening_keep_links_of_inner_chain chain.chain_with_eb_replaced_with_chain_with_eb
chain.replace_chain_with_empty_chain chain.chain_children_with_callbacks chain.chain_children_with_errbacks
chain.chain_with_callback_child_replaced chain.chain_with_errback_child_replaced
chain.chain_child_with_callback_replaced chain.chain_child_with_errback_replaced
chain.task_replaced_with_chain chain.chain_child_replaced_with_chain_first
chain.chain_child_replaced_with_chain_middle chain.chain_child_replaced_with_chain_last
chain.chord_header_id_duplicated_on_rabbitmq_msg_duplication chain.chaining_upgraded_chords_pure_groups
chain.chaining_upgraded_chords_starting_with_chord chain.chaining_upgraded_chords_mixed_canvas
chain.freezing_chain_sets_id_of_last_task chain.chaining_upgraded_chords_mixed_canvas_protocol_2
chain.group_in_center_of_chain chain.upgrade_to_chord_inside_chains
result_set.result_set result_set.result_set_error result_set.result_set_built_via_add
group.ready_with_exception group.empty_group_result group.parent_ids group.nested_group group.large_group
group.group_lone group.nested_group_group group.nested_group_chord_counting_simple
group.nested_group_chord_counting_chain group.nested_group_chord_counting_group
group.nested_group_chord_counting_chord group.nested_group_chord_counting_mixed
group.nested_group_chord_body_chain group.callback_called_by_group group.errback_called_by_group_fail_first
group.errback_called_by_group_fail_last group.mutable_errback_called_by_group
group.errback_called_by_group_fail_multiple group.group_children_with_callbacks
group.group_children_with_errbacks group.group_with_callback_child_replaced
group.group_with_errback_child_replaced group.group_child_with_callback_replaced
group.group_child_with_errback_replaced group.group_child_replaced_with_chain_first
group.group_child_replaced_with_chain_middle group.group_child_replaced_with_chain_last
group.task_replace_with_group_preserves_group_order
chord.simple_chord_with_a_delay_in_group_save chord.chord_order chord.redis_subscribed_channels_leak
chord.replaced_nested_chord chord.add_to_chord chord.add_chord_to_chord chord.eager_chord_inside_task
chord.group_chain chord.group_kwargs chord.group_args_and_kwargs chord.nested_group_chain
chord.single_task_header chord.empty_header_chord chord.nested_chord chord.parent_ids chord.parent_ids__OR
chord.chord_on_error chord.generator chord.parallel_chords chord.chord_in_chords_with_chains
chord.chain_chord_chain_chord chord.chord_in_chain_with_args chord.chain_in_chain_with_args chord.large_header
chord.chain_to_a_chord_with_large_header chord.priority chord.priority_chain chord.nested_chord_group
chord.nested_chord_group_chain_group_tail chord.error_propagates_from_chord chord.error_propagates_from_chord2
chord.error_propagates_to_chord_from_simple chord.immutable_errback_called_by_chord_from_simple
chord.mutable_errback_called_by_chord_from_simple chord.error_propagates_to_chord_from_chain
chord.immutable_errback_called_by_chord_from_chain chord.mutable_errback_called_by_chord_from_chain
chord.error_propagates_to_chord_from_chain_tail chord.immutable_errback_called_by_chord_from_chain_tail
chord.mutable_errback_called_by_chord_from_chain_tail chord.error_propagates_to_chord_from_group
chord.immutable_errback_called_by_chord_from_group chord.mutable_errback_called_by_chord_from_group
chord.immutable_errback_called_by_chord_from_group_fail_multiple
chord.mutable_errback_called_by_chord_from_group_fail_multiple_on_header_failure
chord.mutable_errback_called_by_chord_from_group_fail_multiple_on_body_failure
chord.chord_header_task_replaced_with_chain chord.chord_header_child_replaced_with_chain_first
chord.chord_header_child_replaced_with_chain_middle chord.chord_header_child_replaced_with_chain_last
chord.chord_body_task_replaced_with_chain chord.chord_body_chain_child_replaced_with_chain_first
chord.chord_body_chain_child_replaced_with_chain_middle chord.chord_body_chain_child_replaced_with_chain_last
chord.nested_chord_header_link_error chord.enabling_flag_allow_error_cb_on_chord_header
chord.disabling_flag_allow_error_cb_on_chord_header
chord.flag_allow_error_cb_on_chord_header_on_upgraded_chord
chord.upgraded_chord_link_error_with_header_errback_enabled
chord.chord_error_propagation_with_different_body_types chord.chord_error_in_nested_chain_does_not_crash
chord.chord_unlock_with_failed_task_in_nested_chain_member
signature_serialization.rebuild_nested_chain_chain signature_serialization.rebuild_nested_chain_group
signature_serialization.rebuild_nested_chain_chord signature_serialization.rebuild_nested_group_chain
signature_serialization.rebuild_nested_group_group signature_serialization.rebuild_nested_group_chord
signature_serialization.rebuild_nested_chord_chain signature_serialization.rebuild_nested_chord_group
signature_serialization.rebuild_nested_chord_chord
stamping_mechanism.stamping_workflow stamping_mechanism.stamping_example_canvas
stamping_mechanism.stamp_value_type_defined_by_visitor
stamping_mechanism.properties_not_affected_from_stamping stamping_mechanism.task_received_has_access_to_stamps
stamping_mechanism.all_tasks_of_canvas_are_stamped stamping_mechanism.replace_merge_stamps
stamping_mechanism.linking_stamped_sig stamping_mechanism.err_linking_stamped_sig
stamping_mechanism.stamps_remain_on_task_retry stamping_mechanism.stamp_canvas_with_dictionary_link
stamping_mechanism.stamp_canvas_with_dictionary_link_error
"""
CASES = _NAMES.split()

_EAGER = "Celery runs the calls in the caller's process here. In omniq's tests, a worker on `memory://` runs them."
_SIGNATURES = "A flow is stored once, when it is started. There is no signature that travels as data and has to be rebuilt."
_STAMPS = "Options of a node may have `metadata`; there are no visitors that change a graph."
_APPLIED = (
    "A flow gets its values while it is built, so a function that builds it takes their place."
)
_FLAGS = "Celery has a setting for this. In omniq, `on_dead` belongs to a function, and `after_any` to a node."
_ERRBACK_STYLES = "Celery has two kinds of error callbacks. `on_dead` gets the dead letter."

LEFT_OUT = {
    "link_error.link_error_eager": _EAGER,
    "link_error.link_error_callback_error_callback_retries_eager": _EAGER,
    "link_error.link_error_using_signature_eager": _EAGER,
    "chain.eager_chain_inside_task": _EAGER,
    "chord.eager_chord_inside_task": _EAGER,
    "chain.freezing_chain_sets_id_of_last_task": "Ids of nodes are known without freezing: `<flow>.<node>`.",
    "chord.redis_subscribed_channels_leak": "There is no channel for each result.",
    "chord.group_kwargs": _APPLIED,
    "chord.group_args_and_kwargs": _APPLIED,
    "chord.add_to_chord": "A task cannot add members to the group that it belongs to; it has children with `ctx.map`.",
    "chord.add_chord_to_chord": "As `chord.add_to_chord`.",
    "chord.enabling_flag_allow_error_cb_on_chord_header": _FLAGS,
    "chord.disabling_flag_allow_error_cb_on_chord_header": _FLAGS,
    "chord.flag_allow_error_cb_on_chord_header_on_upgraded_chord": _FLAGS,
    "chord.upgraded_chord_link_error_with_header_errback_enabled": _FLAGS,
    "chord.nested_chord_header_link_error": _FLAGS,
    "group.mutable_errback_called_by_group": _ERRBACK_STYLES,
    "chord.mutable_errback_called_by_chord_from_simple": _ERRBACK_STYLES,
    "chord.mutable_errback_called_by_chord_from_chain": _ERRBACK_STYLES,
    "chord.mutable_errback_called_by_chord_from_chain_tail": _ERRBACK_STYLES,
    "chord.mutable_errback_called_by_chord_from_group": _ERRBACK_STYLES,
    "chord.mutable_errback_called_by_chord_from_group_fail_multiple_on_header_failure": _ERRBACK_STYLES,
    "chord.mutable_errback_called_by_chord_from_group_fail_multiple_on_body_failure": _ERRBACK_STYLES,
    **{case: _SIGNATURES for case in CASES if case.startswith("signature_serialization.")},
    **{case: _STAMPS for case in CASES if case.startswith("stamping_mechanism.")},
}
"""By case: why no test of omniq stands for it."""
