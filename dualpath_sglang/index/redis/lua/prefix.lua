-- After find.lua. Answers how many leading keys are there, as text.
for i = 1, count do
  local row = rows[i]
  if not row or not block_in(row) then return tostring(i - 1) end
end
return tostring(count)
