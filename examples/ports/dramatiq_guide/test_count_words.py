from count_words import sync_order_to_warehouse

from omniq.testing.manual import ManualQueue


def test_an_order_is_synced(omniq_queue: ManualQueue) -> None:
    handle = omniq_queue.enqueue(sync_order_to_warehouse, 2)
    omniq_queue.run()
    assert handle.result() == 3
