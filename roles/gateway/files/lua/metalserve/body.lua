-- Copyright: the Metalserve authors
-- SPDX-License-Identifier: Apache-2.0
-- What routing needs to know of a request's body, without decoding it: top-level keys and about how many tokens.

local ffi = require "ffi"
local cjson = require "cjson.safe"

local _M = {}

local QUOTE, BACKSLASH, OPEN, CLOSE, OPEN_LIST, CLOSE_LIST, COLON, COMMA = 34, 92, 123, 125, 91, 93, 58, 44
local LONGEST_NAME = 1024
local WANTED = {model = true, max_tokens = true, max_completion_tokens = true, max_output_tokens = true,
    stream = true}

-- Return the position after the string that begins at position, or n + 1 where it does not end.
local function after_string(bytes, position, n)
    position = position + 1
    while position < n do
        local byte = bytes[position]
        if byte == QUOTE then
            return position + 1
        elseif byte == BACKSLASH then
            position = position + 2
        else
            position = position + 1
        end
    end
    return n + 1
end

local function after_space(bytes, position, n)
    while position < n and bytes[position] <= 32 do
        position = position + 1
    end
    return position
end

-- Return the whole number that begins at position, or nil.
local function number(bytes, position, n)
    position = after_space(bytes, position, n)
    local first, found = position, 0
    while position < n and bytes[position] >= 48 and bytes[position] <= 57 do
        found = found * 10 + bytes[position] - 48
        position = position + 1
    end
    local stop = after_space(bytes, position, n)
    local is_whole = position > first and stop < n and (bytes[stop] == COMMA or bytes[stop] == CLOSE)
    return is_whole and found or nil
end

-- Return the text (of model), the truth (of stream) or the number (of the others) that begins at position, or nil.
local function value(key, body, bytes, position, n)
    if key == "stream" then
        position = after_space(bytes, position, n)
        return body:sub(position + 1, position + 4) == "true"
    elseif key ~= "model" then
        return number(bytes, position, n)
    end
    position = after_space(bytes, position, n)
    local stop = position < n and bytes[position] == QUOTE and after_string(bytes, position, n)
    return stop and stop <= n and stop - position < LONGEST_NAME and cjson.decode(body:sub(position + 1, stop)) or nil
end

-- Return the wanted top-level keys of a JSON object: model as text, stream as a truth, the others as numbers. Nested keys do not count, and
-- text that is no JSON gives an empty table: the engine will say what is wrong with it.
function _M.keys(body)
    local found, n = {}, #body
    local bytes = ffi.cast("const uint8_t *", body)
    local depth, position = 0, 0
    while position < n do
        local byte = bytes[position]
        if byte == QUOTE then
            local stop = after_string(bytes, position, n)
            if depth == 1 and stop <= n then
                local next_one = stop
                while next_one < n and bytes[next_one] <= 32 do
                    next_one = next_one + 1
                end
                if next_one < n and bytes[next_one] == COLON and stop - position < 24 then
                    local key = body:sub(position + 2, stop - 1)
                    if WANTED[key] then
                        found[key] = value(key, body, bytes, next_one + 1, n)
                    end
                end
            end
            position = stop
        else
            if byte == OPEN or byte == OPEN_LIST then
                depth = depth + 1
            elseif byte == CLOSE or byte == CLOSE_LIST then
                depth = depth - 1
                if depth <= 0 then
                    break
                end
            end
            position = position + 1
        end
    end
    return found
end

-- Return the body of the request, also one that lies in a file; nil where it cannot be read: some versions of the module
-- do not read an HTTP/2 body of unknown length.
function _M.read()
    if not pcall(ngx.req.read_body) then
        return nil
    end
    local text = ngx.req.get_body_data()
    if text then
        return text
    end
    local path = ngx.req.get_body_file()
    if not path then
        return ""
    end
    local file = io.open(path, "rb")
    text = file and file:read("*a")
    if file then
        file:close()
    end
    return text
end

local WINDOWS, WINDOW = 16, 512
-- Text with less white space than this is no language: base64 and the like take many more tokens.
local SPARSE = 0.02

-- Return about how many tokens a body is, from the kinds of its bytes: letters, digits, punctuation, bytes above 127
-- (UTF-8) and \uXXXX escapes have each their own number of bytes per token. Long bodies are sampled evenly. Measured with
-- real tokenizers, see docs/gateway.md.
function _M.tokens(body, per_token)
    local n = #body
    local bytes = ffi.cast("const uint8_t *", body)
    local letters, digits, punctuation, space, high, escaped = 0, 0, 0, 0, 0, 0
    local windows = n > WINDOWS * WINDOW and WINDOWS or 1
    local size = windows == 1 and n or WINDOW
    for window = 0, windows - 1 do
        local first = windows == 1 and 0 or math.floor(window * (n - size) / (windows - 1))
        local position, last = first, first + size
        while position < last do
            local byte = bytes[position]
            if byte == BACKSLASH and position + 1 < n and bytes[position + 1] == 117 then
                escaped = escaped + 6
                position = position + 6
            else
                if byte > 127 then
                    high = high + 1
                elseif byte <= 32 then
                    space = space + 1
                elseif byte >= 48 and byte <= 57 then
                    digits = digits + 1
                elseif (byte >= 65 and byte <= 90) or (byte >= 97 and byte <= 122) then
                    letters = letters + 1
                else
                    punctuation = punctuation + 1
                end
                position = position + 1
            end
        end
    end
    local ascii = letters + digits + punctuation + space
    local seen = ascii + high + escaped
    if seen == 0 then
        return 0
    end
    local dense = ascii > seen / 2 and space < SPARSE * ascii
    local tokens = (letters + space) / (dense and per_token.dense or per_token.letters)
        + digits / per_token.digits + punctuation / per_token.punctuation
        + high / per_token.utf8 + escaped / per_token.escaped
    return math.ceil(n * tokens / seen)
end

return _M
