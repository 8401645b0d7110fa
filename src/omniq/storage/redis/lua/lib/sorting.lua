-- Whether Lua compares strings as sorted sets do. It goes by the server's locale, in most of which 'a' is before 'B'.
local SORTS_BYTES = 'B' < 'a'
