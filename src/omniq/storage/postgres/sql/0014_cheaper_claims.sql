-- Version 14: a claim costs less. Functions are created again, and two indexes of claimed rows differ. Workers of the version
-- before go on working.
-- {schema}  the store's schema

-- A claim makes a new version of a row, which needs an entry in both of these indexes. The pages of the first are full.
-- With deduplication, each entry had the server look for duplicates to merge, of which it found few: now it divides the page.
ALTER INDEX {schema}.live_pkey SET (deduplicate_items = off);

-- All entries of one owner were equal, and were merged and divided again and again. Now a claim appends its entries.
DROP INDEX IF EXISTS {schema}.live_held;
CREATE INDEX live_held ON {schema}.live (owner, seq) WHERE place = 4;
