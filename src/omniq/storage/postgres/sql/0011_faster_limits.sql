-- Version 11: claims through limits cost the server less. Only functions differ, which are created again.
-- {schema}  the store's schema

-- A migration needs a statement.
COMMENT ON TYPE {schema}.leaving IS 'omniq: claims that leave running limits';
