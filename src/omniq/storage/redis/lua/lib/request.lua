-- The request of the caller, and the time.
-- request   1 now in microseconds, 0 for the server's clock; 2 whether this repeats a call whose
--           reply was lost; each script defines the rest
local request = cmsgpack.unpack(ARGV[1])
local is_repeat = request[2] == 1

local now = request[1]
if now == 0 then
  local time = redis.call('TIME')
  now = time[1] * 1000000 + time[2]
end
local now_text = string.format('%.0f', now)

-- 18 digits that sort as instants do. A sum would not fit into the 53 bits of a number.
local now_stamp = '10' .. string.format('%016.0f', now)
