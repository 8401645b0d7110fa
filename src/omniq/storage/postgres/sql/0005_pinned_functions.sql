-- Version 5: functions that do not depend on their caller's search_path. All of them are created again. A worker of
-- version 4 that still runs gets errors, and claims and records nothing: what it calls for that has another name or other
-- parameters.
-- {schema}  the store's schema

DO $$
DECLARE
    v_function regprocedure;
BEGIN
    FOR v_function IN SELECT oid FROM pg_proc WHERE pronamespace = '{schema}'::regnamespace LOOP
        EXECUTE format('DROP FUNCTION %s', v_function);
    END LOOP;
END $$;

-- `oldest` is the oldest version of omniq's schema whose workers can use this one: what only adds to the schema
-- locks out no worker of the version before. Workers before this version do not read it.
ALTER TABLE {schema}.versions ADD COLUMN oldest int NOT NULL DEFAULT 5;
