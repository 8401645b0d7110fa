"""What an operator asks and does, over any storage: the command line and the dashboard share it.

`overview` says how it goes, `details` what became of one task, `reasons` why it does not run,
`bulk` acts on many. All of it is plain data and plain functions; how it looks is others' business.
"""
