-- Deletes those of the documents that have the given data.
-- :keys     a JSON array of [kind, key, data in hexadecimal]
DELETE FROM omniq_documents
WHERE (kind, key) IN (
    SELECT json_extract(value, '$[0]'), json_extract(value, '$[1]') FROM json_each(:keys)
)
AND (kind, key, hex(data)) IN (
    SELECT json_extract(value, '$[0]'), json_extract(value, '$[1]'), json_extract(value, '$[2]')
    FROM json_each(:keys)
)
