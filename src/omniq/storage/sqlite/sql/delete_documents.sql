-- Deletes documents.
-- :keys     a JSON array of [kind, key]
DELETE FROM omniq_documents
WHERE (kind, key) IN (
    SELECT json_extract(value, '$[0]'), json_extract(value, '$[1]') FROM json_each(:keys)
)
