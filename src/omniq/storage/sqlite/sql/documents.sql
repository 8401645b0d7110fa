-- The documents of a kind with these keys.
-- {document} see tables.py
-- :kind, :keys (a JSON array)
-- returns   a JSON array of documents
SELECT json_group_array({document})
FROM json_each(:keys) AS wanted
CROSS JOIN omniq_documents AS found ON found.kind = :kind AND found.key = wanted.value
