-- Copyright: the Metalserve authors
-- SPDX-License-Identifier: Apache-2.0
-- Looks after the replicas, every second or so, in one worker at a time. It alone decides what is observed healthy.
--
-- dead:   the connection is refused, or three probes in a row got no answer while no token came either
-- wedged: work in flight, and for wedged_after_s neither a token nor a step of the engine
-- back:   two probes in a row answered and one real completion

local cjson = require "cjson.safe"
local config = require "metalserve.config"
local state = require "metalserve.state"

local _M = {}

local shared = ngx.shared.metalserve
local MISSES, RETURN_PROBES, RETURN_TIMEOUT_MS = 3, 2, 20000
-- What this worker has seen, by replica: misses and answers in a row, the engine's counter, and since when it stands.
local seen = {}

local function ask(replica, method, path, timeout_ms, payload)
    local socket = ngx.socket.tcp()
    socket:settimeouts(timeout_ms, timeout_ms, timeout_ms)
    local ok, err = socket:connect(replica.address, replica.port)
    if not ok then
        return nil, err
    end
    local lines = {method .. " " .. path .. " HTTP/1.0", "Host: " .. replica.address, "Connection: close"}
    if config.engine_token ~= "" then
        lines[#lines + 1] = "Authorization: Bearer " .. config.engine_token
    end
    if payload then
        lines[#lines + 1] = "Content-Type: application/json"
        lines[#lines + 1] = "Content-Length: " .. #payload
    end
    ok, err = socket:send(table.concat(lines, "\r\n") .. "\r\n\r\n" .. (payload or ""))
    local text
    if ok then
        text, err = socket:receive("*a")
    end
    socket:close()
    if not text then
        return nil, err
    end
    return tonumber(text:match("^HTTP/1%.%d (%d+)")), text
end

-- Return the sum of the engine's counter of progress, or nil.
local function counter(replica)
    local pool = replica.pool
    local status, text = ask(replica, "GET", pool.metrics_path, pool.probe_timeout_ms)
    if status ~= 200 then
        return nil
    end
    local sum = nil
    for value in text:gmatch("\n" .. pool.progress_metric:gsub("%p", "%%%0") .. "%b{} ([%d%.eE%+]+)") do
        sum = (sum or 0) + (tonumber(value) or 0)
    end
    return sum
end

-- Whether the replica really answers: one token.
local function completes(replica)
    local payload = cjson.encode({model = replica.pool.served_name, prompt = "ping", max_tokens = 1})
    return ask(replica, "POST", "/v1/completions", RETURN_TIMEOUT_MS, payload) == 200
end

local function is_wedged(replica, note)
    local id, now = replica.id, ngx.now()
    local busy = state.busy_since(id)
    local silent = now - math.max(state.progress(id), busy)
    if state.in_flight(id) == 0 or silent < replica.pool.wedged_after_s / 2 then
        note.counter = nil
        return false
    end
    -- No token for a while: does the engine itself still step?
    local value = counter(replica)
    if value and note.counter and value ~= note.counter then
        state.set_progress(id)
    end
    note.counter = value or note.counter
    return now - math.max(state.progress(id), busy) > replica.pool.wedged_after_s
end

-- Probe one replica and set what is observed.
local function check(replica)
    local id, pool = replica.id, replica.pool
    local note = seen[id] or {misses = 0, answers = 0}
    seen[id] = note
    local status, err = ask(replica, "GET", pool.health_path, pool.probe_timeout_ms)
    if status and not (pool.health_503_is_death and status == 503) then
        note.misses, note.answers = 0, note.answers + 1
    else
        note.misses, note.answers = note.misses + 1, 0
    end
    if err == "connection refused" then
        state.set_ill(id, "refused")
    end
    state.clear_suspicion(id)
    local reason, since = state.ill(id)
    if reason then
        -- A wedged engine may come to life by itself: its answers to waiting clients are proof enough.
        if reason == "wedged" and state.progress(id) > since then
            return state.set_well(id)
        end
        if note.answers >= RETURN_PROBES and completes(replica) then
            note.counter = nil
            state.set_progress(id)
            return state.set_well(id)
        end
        return
    end
    -- A busy engine may be slow to answer a probe; while its tokens come it is alive.
    if note.misses >= MISSES and ngx.now() - state.progress(id) > MISSES * pool.probe_interval_ms / 1000 then
        return state.set_ill(id, status and "health " .. status or "no answer")
    end
    if is_wedged(replica, note) then
        return state.set_ill(id, "wedged")
    end
end

local rounds = 0

local function round(premature)
    local pid, lease = ngx.worker.pid(), 2.5 * config.settings.probe_interval_ms / 1000
    local leader = shared:get("leader")
    if premature or ngx.worker.exiting() then
        if leader == pid then
            shared:delete("leader")
        end
        return
    end
    -- One worker leads; another takes over when it left, or has not been heard of for two rounds.
    if leader and leader ~= pid then
        return
    end
    if not leader and not shared:add("leader", pid, lease) then
        return
    end
    shared:set("leader", pid, lease)
    rounds = rounds + 1
    if rounds % 4 == 0 then
        state.forget_dead_workers()
    end
    for _, replica in pairs(config.replicas) do
        if not replica.checking then
            replica.checking = true
            ngx.thread.spawn(function()
                local ok, why = pcall(check, replica)
                replica.checking = false
                if not ok then
                    ngx.log(ngx.ERR, "metalserve: checking ", replica.id, ": ", why)
                end
            end)
        end
    end
end

-- Start in this worker (init_worker phase).
function _M.start()
    local ok, err = ngx.timer.every(config.settings.probe_interval_ms / 1000, round)
    if not ok then
        ngx.log(ngx.ERR, "metalserve: the checker does not start: ", err)
    end
end

return _M
