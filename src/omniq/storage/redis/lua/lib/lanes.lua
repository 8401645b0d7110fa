-- Collects the changes of lanes (see lib/heads).
local lane_changes = {} -- lane → { its head before, the first order that was added, whether tasks were removed }

-- Note a change of a lane, before it is written.
local function change_lane(lane, added)
  local change = lane_changes[lane]
  if not change then
    change = { head = head_of(lane) }
    lane_changes[lane] = change
  end
  if not added then
    change.removed = true
  elseif not change.added or added < change.added then
    change.added = added
  end
end

-- Make the heads those of the lanes, once `ready` has been written.
local function update_heads()
  for lane, change in pairs(lane_changes) do
    local known = change.head
    local head = known
    if change.removed then
      head = head_of(lane)
    elseif not known or change.added < known then
      head = change.added
    end
    if head ~= known then move_head(lane, known, head) end
  end
  lane_changes = {}
end
