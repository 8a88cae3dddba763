-- Copyright: the Metalserve authors
-- SPDX-License-Identifier: Apache-2.0
-- The loopback side: what is in rotation and why, and how playbooks change it. No reload is ever needed for that.

local cjson = require "cjson.safe"
local config = require "metalserve.config"
local state = require "metalserve.state"

local _M = {}

local function answer(status, value)
    ngx.status = status
    ngx.header["Content-Type"] = "application/json"
    ngx.say(cjson.encode(value))
    return ngx.exit(status)
end

local function replica_state(replica)
    local reason, since = state.ill(replica.id)
    local desired = state.wish(replica.id) or {}
    if replica.down then
        desired = {by = "gateway_drained"}
    end
    desired["in"] = state.is_in(replica)
    return {
        replica = replica.id,
        address = replica.server,
        in_flight = state.in_flight(replica.id),
        desired = desired,
        observed = reason and {healthy = false, reason = reason, since = since} or {healthy = true},
    }
end

-- GET /state: all pools and replicas.
function _M.state()
    local pools = {}
    for position, pool in ipairs(config.pools) do
        local replicas = {}
        for number, replica in ipairs(pool.servers) do
            replicas[number] = replica_state(replica)
        end
        pools[position] = {
            pool = pool.name,
            in_flight = state.in_flight(pool.counter),
            max_in_flight = pool.max_in_flight,
            eligible = #state.eligible(pool),
            replicas = replicas,
        }
    end
    return answer(200, {pools = pools})
end

-- POST /rotation {"replica": "host/name" or "host": "host", "in": true or false, "by": who, "run": which run}.
function _M.rotation()
    if ngx.req.get_method() ~= "POST" then
        return answer(405, {error = "send POST"})
    end
    ngx.req.read_body()
    local wish = cjson.decode(ngx.req.get_body_data() or "")
    if type(wish) ~= "table" or type(wish["in"]) ~= "boolean" or type(wish.by) ~= "string" then
        return answer(400, {error = 'send {"replica" or "host": name, "in": true or false, "by": who, "run": id}'})
    end
    local found = {}
    for id, replica in pairs(config.replicas) do
        if id == wish.replica or (wish.host and replica.host == wish.host) then
            found[#found + 1] = replica
        end
    end
    if #found == 0 then
        return answer(404, {error = "no replica " .. tostring(wish.replica or wish.host)})
    end
    local result = {}
    for number, replica in ipairs(found) do
        local kept, err = state.set_desired(replica.id, wish["in"], wish.by, wish.run)
        if not kept then
            return answer(500, {error = "in force, but not kept on the disk: " .. tostring(err)})
        end
        result[number] = replica_state(replica)
    end
    return answer(200, {replicas = result})
end

-- GET /metrics, for Prometheus.
function _M.metrics()
    local lines = {
        "# HELP metalserve_gateway_in_flight Requests of this gateway that a replica works on.",
        "# TYPE metalserve_gateway_in_flight gauge",
        "# HELP metalserve_gateway_desired Whether playbooks want the replica in rotation.",
        "# TYPE metalserve_gateway_desired gauge",
        "# HELP metalserve_gateway_healthy Whether the checker finds the replica healthy.",
        "# TYPE metalserve_gateway_healthy gauge",
    }
    for _, pool in ipairs(config.pools) do
        for _, replica in ipairs(pool.servers) do
            local labels = string.format('{pool="%s",node="%s",replica="%s"} ', pool.name, replica.host, replica.replica)
            lines[#lines + 1] = "metalserve_gateway_in_flight" .. labels .. state.in_flight(replica.id)
            lines[#lines + 1] = "metalserve_gateway_desired" .. labels .. (state.is_in(replica) and 1 or 0)
            lines[#lines + 1] = "metalserve_gateway_healthy" .. labels .. (state.ill(replica.id) and 0 or 1)
        end
    end
    ngx.header["Content-Type"] = "text/plain; version=0.0.4"
    ngx.say(table.concat(lines, "\n"))
end

return _M
