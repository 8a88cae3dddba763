-- Copyright: the Metalserve authors
-- SPDX-License-Identifier: Apache-2.0
-- The plan and the keys, read once by the master before it forks its workers.

local cjson = require "cjson.safe"

local _M = {pools = {}, by_name = {}, models = {}, replicas = {}, keys = {}, vips = {}, engine_token = ""}

local function read(path)
    local file, err = io.open(path, "rb")
    if not file then
        error("metalserve: " .. err)
    end
    local text = file:read("*a")
    file:close()
    local value, why = cjson.decode(text)
    if not value then
        error("metalserve: " .. path .. ": " .. why)
    end
    return value
end

local function binary(digits)
    return (digits:gsub("%x%x", function(two) return string.char(tonumber(two, 16)) end))
end

-- Fill the tables from plan.json and keys.json in folder. Raises an error, which nginx -t shows.
function _M.load(folder)
    local plan = read(folder .. "/plan.json")
    local secrets = read(folder .. "/keys.json")
    _M.pools, _M.by_name, _M.models, _M.replicas, _M.keys, _M.vips = {}, {}, {}, {}, {}, {}
    _M.settings = plan.settings
    _M.default_model = plan.pools[1].served_name
    for position, pool in ipairs(plan.pools) do
        pool.position, pool.counter = position, "pool|" .. pool.name
        _M.pools[position] = pool
        _M.by_name[pool.name] = pool
        local same = _M.models[pool.served_name] or {}
        _M.models[pool.served_name] = same
        same[#same + 1] = pool
        for _, replica in ipairs(pool.servers) do
            replica.pool = pool
            _M.replicas[replica.id] = replica
        end
    end
    for _, same in pairs(_M.models) do
        table.sort(same, function(a, b)
            if a.max_model_len ~= b.max_model_len then
                return a.max_model_len < b.max_model_len
            end
            return a.position < b.position
        end)
    end
    for _, entry in ipairs(secrets.clients) do
        _M.keys[binary(entry.sha256)] = entry
        _M.vips[entry.name] = entry.vip or nil
    end
    _M.has_vip = next(_M.vips) ~= nil
    _M.engine_token = secrets.engine_token
end

return _M
