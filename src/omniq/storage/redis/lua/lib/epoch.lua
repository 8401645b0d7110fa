-- The store's record, and its epoch, which is the record's `due`: see lib/documents.
local store_record = redis.call('HGET', KEYS.documents, 'store/store') or ''
local store_epoch = tonumber(string.sub(store_record, 3, 18)) or 0
