-- Copyright: the Metalserve authors
-- SPDX-License-Identifier: Apache-2.0
-- Signs of life in a stream whose engine is silent: long prefills, or a queue. nginx cannot write into an answer that it
-- passes on, so such a request is asked once more through the gateway's own loopback door, and this stands between the
-- two. All the rest (room, replica, retries, the log) happens behind that door, as for every other request.

local cjson = require "cjson.safe"
local config = require "metalserve.config"

local _M = {}

-- A comment: clients of server-sent events must ignore it.
local SIGN = ": still working\n\n"
local PASSED = {
    "Authorization", "Content-Type", "Accept", "X-Metalserve-Pool", "X-Prompt-Tokens", "X-Session-Id", "Traceparent",
    "Tracestate",
}

local function request(body)
    local lines = {
        "POST " .. ngx.var.request_uri .. " HTTP/1.1", "Host: inside", "Connection: close", "Content-Length: " .. #body,
        "X-Request-Id: " .. ngx.var.metalserve_request_id, "X-Metalserve-Client: " .. ngx.var.remote_addr,
    }
    for _, name in ipairs(PASSED) do
        local value = ngx.var["http_" .. name:lower():gsub("-", "_")]
        if value then
            lines[#lines + 1] = name .. ": " .. value
        end
    end
    return {table.concat(lines, "\r\n"), "\r\n\r\n", body}
end

-- What comes from a socket, line by line or as it is; whenever nothing came for a time, silent is called.
local function reader(socket, silent)
    local buffer = ""
    local function more()
        while true do
            local data, err = socket:receiveany(16384)
            if data then
                buffer = buffer .. data
                return true
            elseif err ~= "timeout" then
                return false
            end
            silent()
        end
    end
    local self = {}
    function self.line()
        while true do
            local stop = buffer:find("\r\n", 1, true)
            if stop then
                local text = buffer:sub(1, stop - 1)
                buffer = buffer:sub(stop + 2)
                return text
            elseif not more() then
                return nil
            end
        end
    end
    function self.some(most)
        if buffer == "" and not more() then
            return nil
        end
        local text = buffer:sub(1, most)
        buffer = buffer:sub(#text + 1)
        return text
    end
    return self
end

-- Give each part of a body to take. Returns whether it came to its end.
local function each_part(from, headers, take)
    local function exactly(left)
        while left > 0 do
            local part = from.some(left)
            if not part then
                return false
            end
            left = left - #part
            take(part)
        end
        return true
    end
    if headers["transfer-encoding"] ~= "chunked" then
        return exactly(tonumber(headers["content-length"]) or 0)
    end
    while true do
        local size = tonumber((from.line() or ""):match("^%x+"), 16)
        if not size or not exactly(size) or not from.line() then
            return false
        elseif size == 0 then
            return true
        end
    end
end

-- Content phase: ask inside, pass on what comes, and say something when nothing does.
function _M.run()
    local socket = ngx.socket.tcp()
    local heartbeat_ms = config.settings.heartbeat_s * 1000
    socket:settimeouts(1000, 60000, heartbeat_ms)
    local text = require("metalserve.body").read()
    if not text or not socket:connect("127.0.0.1", config.settings.inner_port) or not socket:send(request(text)) then
        return ngx.exit(502)
    end

    local ending, begun = "\n\n", false
    local function pass(part)
        ending = (ending .. part):sub(-2)
        begun = true
        ngx.print(part)
        if not ngx.flush(true) then
            socket:close()
            return ngx.exit(499)
        end
    end
    local from = reader(socket, function()
        -- Only between two events.
        if ending == "\n\n" then
            if not begun then
                ngx.header["Content-Type"] = "text/event-stream"
            end
            pass(SIGN)
        end
    end)

    local status = tonumber((from.line() or ""):match("^HTTP/1%.%d (%d+)"))
    local headers, line = {}, nil
    repeat
        line = from.line()
        local name, value = (line or ""):match("^([^:]+): *(.-) *$")
        if name then
            headers[name:lower()] = value
        end
    until not name
    if not status then
        return ngx.exit(begun and ngx.ERROR or 502)
    end
    if not begun then
        ngx.status = status
        ngx.header["Content-Type"], ngx.header["Retry-After"] = headers["content-type"], headers["retry-after"]
    elseif status ~= 200 then
        -- Too late for a status: the error becomes an event, on one line.
        local parts = {}
        each_part(from, headers, function(part) parts[#parts + 1] = part end)
        local said = cjson.decode(table.concat(parts)) or {error = {message = "The request failed.", code = status}}
        return pass("data: " .. cjson.encode(said) .. "\n\ndata: [DONE]\n\n")
    end
    local whole = each_part(from, headers, pass)
    socket:close()
    if not whole then
        -- A broken-off answer must look broken off here too.
        return ngx.exit(ngx.ERROR)
    end
end

return _M
