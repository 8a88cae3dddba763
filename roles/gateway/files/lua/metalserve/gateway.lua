-- Copyright: the Metalserve authors
-- SPDX-License-Identifier: Apache-2.0
-- One request from key to answer: who asks, which pool, is there room, which replica.

local ffi = require "ffi"
local balancer = require "ngx.balancer"
local cjson = require "cjson.safe"
local get_request = require("resty.core.base").get_request
local body = require "metalserve.body"
local config = require "metalserve.config"
local state = require "metalserve.state"

-- The low-level calls: the short one looks its algorithm up each time. The context has room for OpenSSL's.
ffi.cdef [[
int SHA256_Init(void *context);
int SHA256_Update(void *context, const void *data, size_t length);
int SHA256_Final(unsigned char *digest, void *context);
]]

local _M = {}

local context, digest = ffi.new("uint64_t[32]"), ffi.new("unsigned char[32]")
local noted = {}

local function sha256(text)
    ffi.C.SHA256_Init(context)
    ffi.C.SHA256_Update(context, text, #text)
    ffi.C.SHA256_Final(digest, context)
    local found = ffi.string(digest, 32)
    return found
end

-- What is known of each request that is under way, by the address that nginx has it at: that stays the same through internal
-- redirects, which ngx.ctx does not outlive. The log phase, which every request comes to, ends it. Variables, which cost far
-- more than a table's fields, are for what nginx itself reads: the access log, the way to the engine.
local under_way = {}

local function address()
    local where = tonumber(ffi.cast("uintptr_t", get_request()))
    return where
end

-- Answer with an error in the form that OpenAI's clients read, and end the request.
local function refuse(status, kind, code, message)
    ngx.status = status
    ngx.header["Content-Type"] = "application/json"
    ngx.say(cjson.encode({error = {message = message, type = kind, param = cjson.null, code = code}}))
    return ngx.exit(status)
end

-- An id for a request that brought none: a beginning that is this worker's own, and a number that comes again after 2^40.
-- nginx's $request_id asks OpenSSL for random bytes each time, which costs as much as finding the replica.
local own_beginning, number
local STEP, NUMBERS = 679471275673, 2 ^ 40

local function begin_ids()
    local file = assert(io.open("/dev/urandom", "rb"))
    own_beginning = file:read(11):gsub(".", function(byte) return string.format("%02x", byte:byte()) end)
    number = math.random(0, 2 ^ 31)
    file:close()
end

local function new_id()
    if not own_beginning then
        begin_ids()
    end
    number = (number + STEP) % NUMBERS
    local id = string.format("%s%010x", own_beginning, number)
    return id
end

-- Keys -----------------------------------------------------------------------------------------------------------

local SPACE, LONGEST_KEY = 32, 512

-- Before the body is read, and before the limit on a key's rate where there is one: find the client by the SHA-256 of
-- its key. The look-up is by digest, so its time says nothing about a key.
function _M.authenticate()
    local header = ngx.var.http_authorization or ""
    local key = header:byte(8) == SPACE and header:sub(8):gsub("^ +", "") or header:sub(8)
    local client = #key <= LONGEST_KEY and header:sub(1, 7):lower() == "bearer " and config.keys[sha256(key)]
    if not client then
        return ngx.exit(401)
    end
    local request = {key_name = client.name}
    under_way[address()] = request
    ngx.var.metalserve_key_name = client.name
    if not ngx.var.http_x_request_id then
        ngx.var.metalserve_new_id = new_id()
    end
    return request
end

-- Pools ----------------------------------------------------------------------------------------------------------

-- A chat template adds this many tokens at most; nothing else can make more tokens than bytes.
local TEMPLATE_TOKENS = 512

-- Return the pools that a request may use, best first: by name, else the model's pools that hold it, shortest first, else
-- the longest. The rest of the list is where it goes when the first has no replica. Then, how many tokens it can be at
-- the very most, or the name of a model that is not served; and whether a stream is wanted.
local function candidates(request, text)
    local keys = text and body.keys(text) or {}
    local answer = keys.max_completion_tokens or keys.max_tokens or keys.max_output_tokens or 0
    local most = text and #text + answer + TEMPLATE_TOKENS or math.huge
    local named = config.by_name[ngx.var.http_x_metalserve_pool or ""]
    if named then
        return {named}, 0, keys.stream
    end
    local pools = config.models[keys.model or config.default_model]
    if not pools then
        return nil, keys.model
    end
    local told = ngx.var.http_x_prompt_tokens
    local need = told and tonumber(told:match("^%d+$"))
    if not need and text then
        need = body.tokens(text, config.settings.bytes_per_token)
    end
    if not need then
        return {pools[#pools]}, most, keys.stream
    end
    need = need + answer
    request.tokens, ngx.var.metalserve_tokens = need, need
    local fit = {}
    for _, pool in ipairs(pools) do
        if pool.max_model_len >= need then
            fit[#fit + 1] = pool
        end
    end
    return #fit > 0 and fit or {pools[#pools]}, most, keys.stream
end

-- Return the first pool of the same model that is longer than this one and has a replica.
local function longer(pool)
    for _, other in ipairs(config.models[pool.served_name]) do
        if other.max_model_len > pool.max_model_len and #state.eligible(other) > 0 then
            return other
        end
    end
end

-- Return the least loaded of a list's replicas, other than the one to avoid. Of a long list a few are looked at: the best
-- of eight random ones is nearly as good as the best, at a fraction of the look-ups.
local LOOKED_AT = 8

local function least(list, avoid)
    local n, best, best_count = #list, nil, nil
    local start = math.random(n)
    local step = n <= 2 * LOOKED_AT and 1 or math.random(n - 1)
    for look = 0, (n <= 2 * LOOKED_AT and n or LOOKED_AT) - 1 do
        local replica = list[(start + look * step) % n + 1]
        if replica.id ~= avoid then
            local count = state.in_flight(replica.id)
            if not best or count < best_count then
                best, best_count = replica, count
            end
        end
    end
    return best, best_count
end

-- Return the replica that a session or a common beginning of prompts belongs to, by rendezvous hashing; nil without one.
local function home(list, text)
    local mode, token = config.settings.affinity, nil
    if mode == "session" then
        token = ngx.var.http_x_session_id
    elseif mode == "prefix" and text then
        local first = text:find('"messages"', 1, true) or text:find('"prompt"', 1, true)
        token = first and text:sub(first, first + 1023)
    end
    if not token or token == "" then
        return nil
    end
    local best, best_score
    for _, replica in ipairs(list) do
        local score = ngx.crc32_short(replica.id .. "|" .. token)
        if not best or score > best_score then
            best, best_score = replica, score
        end
    end
    return best
end

-- Return the replica for a request and what it has in flight. Only one with less than most keeps its sessions.
local function choose(list, avoid, text, most)
    local best, count = least(list, avoid)
    local wanted = best and not avoid and home(list, text)
    if wanted then
        local there = state.in_flight(wanted.id)
        -- Warm caches are worth a short queue, not a long one.
        if there < most and there <= 2 * count + config.settings.affinity_slack then
            return wanted, there
        end
    end
    return best, count
end

local function take(request, replica)
    if state.count(replica.id, 1) == 1 then
        -- From idle to busy: the time without progress begins now.
        state.set_busy(replica.id)
    end
    request.replica, ngx.var.metalserve_peer = replica, replica.id
end

local function give_back(request)
    local replica = request.replica
    if replica then
        state.count(replica.id, -1)
        request.replica, ngx.var.metalserve_peer = nil, ""
    end
    return replica
end

-- Admission ------------------------------------------------------------------------------------------------------

local function enter_pool(request, pool)
    request.pool, request.counted = pool, true
    return state.count_pool(pool, 1)
end

local function leave_pool(request)
    if request.counted then
        request.counted = false
        state.count_pool(request.pool, -1)
    end
end

local function too_many(rejected, message)
    ngx.var.metalserve_rejected = rejected
    message = message or "Too many requests in flight; try again shortly."
    return refuse(429, "rate_limit_error", "rate_limit_exceeded", message)
end

-- Return how many requests the replicas of list may have together: their batches and the pool's queue, this gateway's part.
local function room(pool, list, key_name)
    local most = math.ceil((#list * pool.max_num_seqs + pool.queue) / pool.gateways)
    if config.has_vip and not config.vips[key_name] then
        most = math.max(1, math.floor(most * (1 - config.settings.vip_share)))
    end
    return most
end

-- Return whether a request comes within the pool's planned rate: so many a second, as many at once as there is room for.
local function in_time(pool)
    return pool.requests_per_s == 0 or state.within_rate(pool.name, pool.requests_per_s, pool.max_in_flight)
end

-- Return how many of a pool's requests are with replicas that get no new ones.
local function elsewhere(list)
    local count = 0
    for _, replica in ipairs(list.out) do
        count = count + state.in_flight(replica.id)
    end
    return count
end

-- Take the request into a pool and give it a replica of list, unless these are full.
local function enter(request, pool, list, text)
    local replica, count = choose(list, nil, text, pool.replica_max_in_flight)
    local pool_count = enter_pool(request, pool) - elsewhere(list)
    if pool_count > room(pool, list, request.key_name) or count >= pool.replica_max_in_flight then
        leave_pool(request)
        return too_many("pool_full")
    end
    request.others = #list > 1
    take(request, replica)
end

local function is_inside()
    return ngx.var.server_port == config.settings.inner_port_text
end

-- Access phase: key, body, pool, room, replica.
function _M.access()
    local request = under_way[address()] or _M.authenticate()
    local text = body.read()
    if not text and not is_inside() then
        return ngx.exec("@metalserve_inside")
    end
    local pools, most, stream = candidates(request, text)
    if not pools then
        local name = most:match("^[%w._/@:+ -]+$")
        local message = name and "The model '" .. name .. "' does not exist." or "There is no such model."
        return refuse(404, "invalid_request_error", "model_not_found", message)
    end
    local pool, list
    for _, one in ipairs(pools) do
        list = state.eligible(one)
        if #list > 0 then
            pool = one
            break
        end
    end
    ngx.var.metalserve_pool = (pool or pools[1]).name
    if not pool then
        ngx.var.metalserve_rejected = "no_replica"
        ngx.header["Retry-After"] = "5"
        return refuse(503, "server_error", "unavailable", "No replica of this model is available; try again shortly.")
    end
    if text and #text > pool.body_limit_bytes then
        return refuse(413, "invalid_request_error", "request_too_large", "The body is larger than this model takes.")
    end
    if stream and pool.heartbeat and not is_inside() then
        return ngx.exec("@metalserve_relay")
    end
    local allowed = config.settings.key_max_in_flight
    if allowed > 0 then
        request.key_counted = true
        if state.count("key|" .. request.key_name, 1) > allowed then
            return too_many("key_full")
        end
    end
    if not in_time(pool) then
        return too_many("pool_rate", "Too many requests a second; try again shortly.")
    end
    enter(request, pool, list, text)
    -- Only where a replica could find the request too long is its 400 looked at: there the text of a 400 is lost.
    if most > pool.max_model_len and longer(pool) then
        return ngx.exec("@metalserve_climbing")
    end
end

-- A replica refused before any byte went out. Full (503): once, another one is asked. Too long, by its count (400): a
-- longer pool is asked, and what that says is the answer.
function _M.retry()
    local request = under_way[address()]
    local pool, first = request.pool, give_back(request)
    if (ngx.var.upstream_status or ""):match("(%d+)$") == "400" then
        local above = longer(pool)
        leave_pool(request)
        if not above then
            return refuse(503, "server_error", "unavailable", "No replica for this length is available; try again shortly.")
        end
        ngx.var.metalserve_pool = above.name
        return enter(request, above, state.eligible(above), body.read())
    end
    local other = choose(state.eligible(pool), first.id)
    ngx.var.metalserve_rejected = "503"
    if not other then
        return refuse(503, "server_error", "overloaded", "All replicas of this model are busy; try again shortly.")
    end
    take(request, other)
end

-- Return a replica of another pool of the same model that holds the request, where it may go to another pool.
local function of_another_pool(request)
    local need, pool = request.tokens, request.pool
    for _, other in ipairs(need and config.models[pool.served_name] or {}) do
        if other ~= pool and other.max_model_len >= need and #state.eligible(other) > 0 then
            return (least(state.eligible(other)))
        end
    end
end

-- Balancer phase: the chosen replica; after a failed connect, once, another one.
function _M.balance()
    local request = under_way[address()]
    local replica, pool = request.replica, request.pool
    if balancer.get_last_failure() then
        -- Only the checker says what is observed; until it has looked, others are asked.
        state.suspect(replica.id)
        give_back(request)
        local other = least(state.eligible(pool), replica.id) or of_another_pool(request)
        if other and other.pool ~= pool then
            leave_pool(request)
            pool = other.pool
            ngx.var.metalserve_pool = pool.name
            enter_pool(request, pool)
        end
        replica = other or replica
        take(request, replica)
    elseif request.others or of_another_pool(request) then
        balancer.set_more_tries(1)
    end
    balancer.set_timeouts(pool.connect_s, pool.send_s, pool.read_s)
    local ok, err = balancer.set_current_peer(replica.address, replica.port)
    if not ok then
        ngx.log(ngx.ERR, "metalserve: ", replica.id, ": ", err)
        return ngx.exit(ngx.ERROR)
    end
end

-- What clients may know of an engine's answer. Everything else is the engine's own affair.
local SHOWN = {}
for name in ([[connection content-encoding content-length content-type date retry-after server transfer-encoding
    www-authenticate x-request-id]]):gmatch("%S+") do
    SHOWN[name] = true
    -- As engines write it.
    SHOWN[name:gsub("%f[%a]%a", string.upper)] = true
end

-- What an answer that says no needs beside it. A body that nginx itself could not read is answered with a page of its own,
-- where clients get JSON.
local function mend(status, request)
    if status == 401 then
        ngx.header["WWW-Authenticate"] = 'Bearer realm="metalserve"'
    elseif (status == 429 or status == 503) and not ngx.header["Retry-After"] then
        -- Also where an engine says 503 and forgets to say when to come back.
        ngx.header["Retry-After"] = "1"
    elseif status == 400 and request and ngx.header["Content-Type"] == "text/html" then
        local text = cjson.encode({error = {
            message = "The request could not be read.", type = "invalid_request_error", param = cjson.null, code = "bad_request",
        }}) .. "\n"
        request.instead = text
        ngx.header["Content-Type"] = "application/json"
        ngx.header["Content-Length"] = #text
    end
end

-- Header filter: an engine's own headers stay here.
function _M.head()
    local request, status = under_way[address()], ngx.status
    if request and request.replica then
        -- For the body filter. That an engine could not be reached, or said nothing in time, is not its own answer.
        request.answers = status ~= 502 and status ~= 504
        for name in pairs(ngx.resp.get_headers(0, true)) do
            if not SHOWN[name] and not SHOWN[name:lower()] then
                ngx.header[name] = nil
            end
        end
    end
    if status >= 400 then
        mend(status, request)
    end
end

local DATA, COMMENT = ("d"):byte(), (":"):byte()

-- Body filter: a part of an answer is progress; an error as the first event of a stream is a refusal that came as a 200.
function _M.filter()
    local request = under_way[address()]
    if not request then
        return
    end
    if request.instead then
        ngx.arg[1], ngx.arg[2] = request.instead, true
        request.instead = ""
        return
    end
    local replica = request.answers and request.replica
    if not replica then
        return
    end
    local id = replica.id
    local now = ngx.now()
    if now - (noted[id] or 0) >= 0.5 then
        noted[id] = now
        state.set_progress(id)
    end
    if not request.looked then
        local part = ngx.arg[1]
        if part and #part > 0 and part:byte(1) ~= COMMENT then
            request.looked = true
            local begins_with_error = part:byte(1) == DATA and part:find("^data: ?{%s*\"error\"")
            local is_full = ngx.status == 400 and replica.pool.rejects_as_400 and part:lower():find("queue", 1, true)
            if begins_with_error or is_full then
                ngx.var.metalserve_rejected = begins_with_error and "in_stream" or "as_400"
            end
        end
    end
end

-- Log phase: whatever happened, the request is over.
function _M.done()
    local where = address()
    local request = under_way[where]
    if not request then
        return
    end
    under_way[where] = nil
    leave_pool(request)
    if request.key_counted then
        state.count("key|" .. request.key_name, -1)
    end
    -- The variables stay as they are: the access log may be written after this.
    if request.replica then
        state.count(request.replica.id, -1)
    end
end

return _M
