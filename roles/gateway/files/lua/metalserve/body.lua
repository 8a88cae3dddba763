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

-- Return the position after the string that begins at position, or n + 1 where it does not end. Positions are counted from 0.
local function after_string(body, bytes, position, n)
    local from = position + 2
    while true do
        local stop = body:find('"', from, true)
        if not stop then
            return n + 1
        end
        local slashes = stop - 2
        while bytes[slashes] == BACKSLASH do
            slashes = slashes - 1
        end
        -- An even number of backslashes escape each other, not the quote.
        if (stop - 2 - slashes) % 2 == 0 then
            return stop
        end
        from = stop + 1
    end
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
    local stop = position < n and bytes[position] == QUOTE and after_string(body, bytes, position, n)
    return stop and stop <= n and stop - position < LONGEST_NAME and cjson.decode(body:sub(position + 1, stop)) or nil
end

-- Return the wanted top-level keys of a JSON object: model as text, stream as a truth, the others as numbers. Nested keys do not count, and
-- text that is no JSON gives an empty table: the engine will say what is wrong with it.
function _M.keys(body)
    local found, n = {}, #body
    local bytes = ffi.cast("const uint8_t *", body)
    local depth, position = 0, 0
    while true do
        -- Everything else between two strings is of no interest.
        position = (body:find('[%[%]{}"]', position + 1) or n + 1) - 1
        if position >= n then
            return found
        end
        local byte = bytes[position]
        if byte == QUOTE then
            local stop = after_string(body, bytes, position, n)
            if stop > n then
                return found
            end
            if depth == 1 and stop - position < 24 then
                local colon = after_space(bytes, stop, n)
                local key = body:sub(position + 2, stop - 1)
                if WANTED[key] and colon < n and bytes[colon] == COLON then
                    found[key] = value(key, body, bytes, colon + 1, n)
                end
            end
            position = stop
        else
            depth = depth + ((byte == OPEN or byte == OPEN_LIST) and 1 or -1)
            if depth <= 0 then
                return found
            end
            position = position + 1
        end
    end
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
-- The kind of each byte, and how many there are of each: one look-up a byte, without a branch.
local LETTER, DIGIT, PUNCTUATION, BLANK, HIGH = 0, 1, 2, 3, 4
local kind, counts = ffi.new("uint8_t[256]"), ffi.new("int32_t[5]")
for byte = 0, 255 do
    local character = string.char(byte)
    kind[byte] = byte > 127 and HIGH or byte <= 32 and BLANK or character:find("^%d") and DIGIT
        or character:find("^%a") and LETTER or PUNCTUATION
end

-- Return about how many tokens a body is, from the kinds of its bytes: letters, digits, punctuation, bytes above 127
-- (UTF-8) and \uXXXX escapes have each their own number of bytes per token. Long bodies are sampled evenly. Measured with
-- real tokenizers, see docs/gateway.md.
function _M.tokens(body, per_token)
    local n = #body
    local bytes = ffi.cast("const uint8_t *", body)
    local escaped = 0
    local windows = n > WINDOWS * WINDOW and WINDOWS or 1
    local size = windows == 1 and n or WINDOW
    ffi.fill(counts, ffi.sizeof(counts))
    for window = 0, windows - 1 do
        local first = windows == 1 and 0 or math.floor(window * (n - size) / (windows - 1))
        for position = first, first + size - 1 do
            local one = kind[bytes[position]]
            counts[one] = counts[one] + 1
        end
        -- What belongs to an escape is no letter and no digit.
        local escape = body:find("\\u", first + 1, true)
        while escape and escape + 5 <= first + size do
            for position = escape - 1, escape + 4 do
                local one = kind[bytes[position]]
                counts[one] = counts[one] - 1
            end
            escaped = escaped + 6
            escape = body:find("\\u", escape + 6, true)
        end
    end
    local ascii = counts[LETTER] + counts[DIGIT] + counts[PUNCTUATION] + counts[BLANK]
    local seen = ascii + counts[HIGH] + escaped
    if seen == 0 then
        return 0
    end
    local dense = ascii > seen / 2 and counts[BLANK] < SPARSE * ascii
    local tokens = (counts[LETTER] + counts[BLANK]) / (dense and per_token.dense or per_token.letters)
        + counts[DIGIT] / per_token.digits + counts[PUNCTUATION] / per_token.punctuation
        + counts[HIGH] / per_token.utf8 + escaped / per_token.escaped
    return math.ceil(n * tokens / seen)
end

return _M
