-- The documents of a kind whose keys begin with a prefix, behind a key.
-- {document} see tables.py
-- :kind, :prefix, :after, :limit
-- returns   a JSON array of documents in key order
SELECT json_group_array({document})
FROM (
    SELECT * FROM omniq_documents
    -- The plus sign keeps the search from beginning at :after, if that lies before the prefix.
    WHERE kind = :kind AND key >= max(:prefix, :after) AND key < :prefix || char(1114111)
        AND +key > :after
    ORDER BY key LIMIT :limit
) AS found
