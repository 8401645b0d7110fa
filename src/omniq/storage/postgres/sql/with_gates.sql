-- The tasks that a function returns, and the states of their gates, as lines with the `seq` -1.
-- {query}  selects from the function
WITH found AS MATERIALIZED ({query})
SELECT * FROM found
UNION ALL
SELECT key, -1, NULL, NULL, NULL, NULL, due, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL,
    NULL, NULL, data, NULL, NULL, NULL
FROM {schema}.documents
WHERE kind = 'gate' AND key = ANY (array(SELECT pg_catalog.unnest(gates) FROM found))
