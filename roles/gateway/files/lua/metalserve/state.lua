-- Copyright: the Metalserve authors
-- SPDX-License-Identifier: Apache-2.0
-- What all workers share, in a dictionary that outlives a reload: who is in rotation, and what is in flight.
--
-- A replica gets requests when it is desired in (set by a person's playbook, kept on the disk) and observed healthy (set
-- by the checker). Two owners, one for each half.

local ffi = require "ffi"
local cjson = require "cjson.safe"
local config = require "metalserve.config"

ffi.cdef [[
int chmod(const char *path, unsigned int mode);
int fileno(void *stream);
int fsync(int descriptor);
]]

local _M = {}

local shared = ngx.shared.metalserve
local mirror = ngx.shared.metalserve_workers
local lists, seen_generation = {}, -1

-- Every change of rotation or health makes the workers build their lists anew.
local function changed()
    shared:incr("generation", 1, 0)
end

-- Counters -------------------------------------------------------------------------------------------------------

-- Return when a process began, in ticks since boot, or nil where there is none. A dead child whose parent has not looked
-- yet is a zombie.
local function birth(pid)
    local file = io.open("/proc/" .. pid .. "/stat", "rb")
    if not file then
        return nil
    end
    local status, rest = (file:read("*l") or ""):match("%) (%a)(.*)$")
    file:close()
    return status and status ~= "Z" and rest:match("^" .. (" %S+"):rep(18) .. " (%d+)") or nil
end

-- The entries of a counter: of all workers together, and this worker's own. A process id alone may be another's later, so
-- a worker's name has its birth in it. The master counts nothing, so none of them is handed down.
local names, own_names = {}, {}

local function name_of(counter)
    local name = names[counter]
    if not name then
        name = "n|" .. counter
        names[counter] = name
    end
    return name
end

local function own_name_of(counter)
    local name = own_names[counter]
    if not name then
        local pid = ngx.worker.pid()
        local replica = config.replicas[counter]
        -- The share of a replica is one of its pool too.
        name = pid .. "@" .. (birth(pid) or "") .. (replica and "/" .. replica.pool.name or "") .. "|" .. counter
        own_names[counter] = name
    end
    return name
end

local function add(name, delta)
    local now = shared:incr(name, delta, 0) or 0
    if now < 0 then
        shared:incr(name, -now, 0)
        now = 0
    end
    return now
end

-- Count delta on a counter; the worker's own share is noted, so that it can be taken back if the worker dies.
function _M.count(counter, delta)
    mirror:incr(own_name_of(counter), delta, 0)
    return add(name_of(counter), delta)
end

-- The same for a pool, whose share is that of its replicas: a request enters a pool and takes a replica in one go.
function _M.count_pool(pool, delta)
    return add(name_of(pool.counter), delta)
end

function _M.in_flight(counter)
    return shared:get(name_of(counter)) or 0
end

-- Return whether one more request is within rate a second, with burst of them at once: the entry is the moment at which all
-- that came would be over, one after the other in step with the rate.
function _M.within_rate(name, rate, burst)
    local step, now, entry = 1 / rate, ngx.now(), "rate|" .. name
    local over = shared:incr(entry, step, now) or now
    if over - step < now then
        -- Nothing was waiting: the past counts for nothing.
        shared:incr(entry, now - (over - step))
    elseif over - now > step * burst then
        shared:incr(entry, -step)
        return false
    end
    return true
end

-- Take back what workers that are gone had in flight.
function _M.forget_dead_workers()
    local dead = {}
    for _, name in ipairs(mirror:get_keys(0)) do
        local worker, pid, began, pool, counter = name:match("^((%d+)@(%d*))/?([^|]*)|(.*)$")
        if worker and dead[worker] == nil then
            dead[worker] = birth(pid) ~= began
        end
        if dead[worker] then
            local left = mirror:get(name) or 0
            mirror:delete(name)
            if left > 0 then
                add("n|" .. counter, -left)
                if pool ~= "" then
                    add("n|pool|" .. pool, -left)
                end
                ngx.log(ngx.WARN, "metalserve: took back ", left, " of ", counter, " that worker ", pid, " had left")
            end
        end
    end
end

-- Rotation: desired ----------------------------------------------------------------------------------------------

-- Return what playbooks wish for a replica, {in, by, run, since}; nil where nobody ever said: then it is in.
function _M.wish(id)
    local text = shared:get("wish|" .. id)
    return text and cjson.decode(text) or nil
end

-- Return whether a replica is desired in.
function _M.is_in(replica)
    local wish = _M.wish(replica.id)
    return not replica.down and (not wish or wish["in"])
end

local function save()
    local all = {}
    for id in pairs(config.replicas) do
        all[id] = _M.wish(id)
    end
    local path = config.settings.rotation_file
    local temporary = path .. "." .. ngx.worker.pid()
    local file, err = io.open(temporary, "wb")
    if not file then
        return nil, err
    end
    local text = next(all) and cjson.encode(all) or "{}"
    local written = file:write(text, "\n") and file:flush() and ffi.C.fsync(ffi.C.fileno(file)) == 0
    local closed = file:close()
    -- nginx works without a umask.
    if not (written and closed and ffi.C.chmod(temporary, tonumber("640", 8)) == 0) then
        os.remove(temporary)
        return nil, "could not write " .. temporary
    end
    return os.rename(temporary, path)
end

-- Set whether a replica is desired in. Returns true, or nil and why it could not be kept on the disk.
function _M.set_desired(id, wanted_in, by, run)
    local before = _M.wish(id)
    local since = before and before["in"] == wanted_in and before.since or ngx.time()
    shared:set("wish|" .. id, cjson.encode({["in"] = wanted_in, by = by, run = run, since = since}))
    changed()
    return save()
end

-- Read the rotation from the disk. What a running nginx knows already stays; a broken file means "all in", and is said.
function _M.load_rotation()
    if shared:get("loaded") then
        return
    end
    shared:set("loaded", true)
    local file = io.open(config.settings.rotation_file, "rb")
    if not file then
        return
    end
    local text = file:read("*a")
    file:close()
    local all, err = cjson.decode(text)
    if type(all) ~= "table" then
        ngx.log(ngx.ERR, "metalserve: ", config.settings.rotation_file, " cannot be read: ", err)
        return
    end
    for id, entry in pairs(all) do
        if type(entry) == "table" then
            -- An entry that says nothing else is one of a replica that was taken out.
            entry["in"] = entry["in"] == true
            shared:set("wish|" .. id, cjson.encode(entry))
        end
    end
end

-- Health: observed -----------------------------------------------------------------------------------------------

-- Return why a replica is observed out, and since when; nil while it is healthy.
function _M.ill(id)
    local reason = shared:get("ill|" .. id)
    if reason then
        return reason, shared:get("ill_since|" .. id)
    end
end

function _M.set_ill(id, reason)
    if shared:get("ill|" .. id) ~= reason then
        if not shared:get("ill|" .. id) then
            shared:set("ill_since|" .. id, ngx.now())
        end
        shared:set("ill|" .. id, reason)
        changed()
        ngx.log(ngx.WARN, "metalserve: ", id, " leaves: ", reason)
    end
end

function _M.set_well(id)
    if shared:get("ill|" .. id) then
        shared:delete("ill|" .. id)
        shared:delete("ill_since|" .. id)
        changed()
        ngx.log(ngx.WARN, "metalserve: ", id, " is back")
    end
end

-- Note that a connect failed: until the checker has looked, the replica is asked only where there is no other.
function _M.suspect(id)
    if shared:add("suspect|" .. id, true) then
        changed()
    end
end

function _M.clear_suspicion(id)
    if shared:get("suspect|" .. id) then
        shared:delete("suspect|" .. id)
        changed()
    end
end

-- The moment of a replica's last sign of progress: a part of an answer, or a step of the engine's own counter.
function _M.progress(id)
    return shared:get("progress|" .. id) or 0
end

function _M.set_progress(id)
    shared:set("progress|" .. id, ngx.now())
end

-- The moment since which a replica that was idle has work.
function _M.busy_since(id)
    return shared:get("busy|" .. id) or 0
end

function _M.set_busy(id)
    shared:set("busy|" .. id, ngx.now())
end

-- Choice ---------------------------------------------------------------------------------------------------------

-- Return the replicas of a pool that may get requests; its field out lists the others.
function _M.eligible(pool)
    local generation = shared:get("generation") or 0
    if generation ~= seen_generation then
        lists, seen_generation = {}, generation
    end
    local list = lists[pool.name]
    if not list then
        list = {}
        local suspects = {}
        for _, replica in ipairs(pool.servers) do
            if _M.is_in(replica) and not shared:get("ill|" .. replica.id) then
                local kind = shared:get("suspect|" .. replica.id) and suspects or list
                kind[#kind + 1] = replica
            end
        end
        list = #list > 0 and list or suspects
        local is_in = {}
        for _, replica in ipairs(list) do
            is_in[replica] = true
        end
        list.out = {}
        for _, replica in ipairs(pool.servers) do
            if not is_in[replica] then
                list.out[#list.out + 1] = replica
            end
        end
        lists[pool.name] = list
    end
    return list
end

return _M
