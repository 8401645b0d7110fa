-- The documents of a kind that are due.
-- {document} see tables.py
-- :kind, :due_after, :due_by, :limit
-- returns   a JSON array of documents in order of `due`
SELECT json_group_array({document})
FROM (
    SELECT * FROM omniq_documents
    WHERE kind = :kind AND due > :due_after AND due <= :due_by
    ORDER BY due LIMIT :limit
) AS found
