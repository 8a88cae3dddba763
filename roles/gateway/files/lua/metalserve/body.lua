-- Copyright: the Metalserve authors
-- SPDX-License-Identifier: Apache-2.0
-- What routing needs to know of a request's body, without decoding it: top-level keys and about how many tokens.

local ffi = require "ffi"
local bit = require "bit"
local cjson = require "cjson.safe"

local _M = {}

local QUOTE, BACKSLASH, OPEN, CLOSE, OPEN_LIST, CLOSE_LIST, COLON, COMMA = 34, 92, 123, 125, 91, 93, 58, 44
local ZERO, NINE, TAB, RETURN = 48, 57, 9, 13
local SPACE, LONGEST_NAME, LONGEST_KEY = 32, 1024, 24
local WANTED = {model = true, max_tokens = true, max_completion_tokens = true, max_output_tokens = true,
    stream = true}

-- Whether the quote at position ends a string: an even number of backslashes before it escape each other.
local function ends(bytes, position)
    local slashes = position - 1
    while bytes[slashes] == BACKSLASH do
        slashes = slashes - 1
    end
    return (position - 1 - slashes) % 2 == 0
end

-- Return the position after the string that begins at position, or nil where it does not end. Positions are counted from 0.
-- Most strings have no escaped quote; without a loop on their way the walk below is compiled as a whole.
local function after_string(body, bytes, position)
    local stop = body:find('"', position + 2, true)
    if not stop or bytes[stop - 2] ~= BACKSLASH then
        return stop
    end
    while stop and not ends(bytes, stop - 1) do
        stop = body:find('"', stop + 1, true)
    end
    return stop
end

-- Return what the string from position to stop says.
local function text(body, position, stop)
    local inside = body:sub(position + 2, stop - 1)
    if inside:find("\\", 1, true) then
        return cjson.decode('"' .. inside .. '"')
    end
    return inside
end

-- Return the truth (of stream) or the whole number (of the others) that begins at position, or nil.
local function scalar(key, body, bytes, position)
    if key == "stream" then
        return body:sub(position + 1, position + 4) == "true"
    end
    if key == "model" then
        return nil
    end
    -- By hand, as the walk is compiled and a pattern is not. It ends at the 0 behind each string, if not before.
    local number, first = 0, position
    while bytes[position] >= ZERO and bytes[position] <= NINE do
        number, position = 10 * number + bytes[position] - ZERO, position + 1
    end
    local digits = position - first
    while bytes[position] == SPACE or bytes[position] >= TAB and bytes[position] <= RETURN do
        position = position + 1
    end
    local is_whole = digits > 0 and (bytes[position] == COMMA or bytes[position] == CLOSE)
    return is_whole and number or nil
end

-- Return the wanted top-level keys of a JSON object: model as text, stream as a truth, the others as numbers. Nested keys
-- do not count, and text that is no JSON gives what was found before: the engine will say what is wrong with it.
function _M.keys(body)
    local found, n = {}, #body
    local bytes = ffi.cast("const uint8_t *", body)
    local depth, position, key, is_value = 0, 0, nil, false
    while position < n do
        local byte, after = bytes[position], position + 1
        if byte == QUOTE then
            after = after_string(body, bytes, position)
            if not after then
                return found
            end
            if depth == 1 then
                if is_value then
                    found[key] = key == "model" and after - position < LONGEST_NAME and text(body, position, after) or nil
                    key, is_value = nil, false
                elseif after - position < LONGEST_KEY then
                    key = body:sub(position + 2, after - 1)
                    key = WANTED[key] and key or nil
                end
            end
        elseif byte == OPEN or byte == OPEN_LIST then
            depth, key, is_value = depth + 1, nil, false
        elseif byte == CLOSE or byte == CLOSE_LIST then
            depth = depth - 1
            if depth <= 0 then
                return found
            end
        elseif byte == COLON then
            is_value = key ~= nil
        elseif byte == COMMA then
            key = nil
        elseif is_value and byte > SPACE then
            found[key] = scalar(key, body, bytes, position)
            key, is_value = nil, false
        end
        position = after
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
-- Four counts in one number, 16 bits each, so that a byte costs one look-up and one addition.
local LETTER, DIGIT, PUNCTUATION, BLANK = 1ULL, 0x10000ULL, 0x100000000ULL, 0x1000000000000ULL
local kind = ffi.new("uint64_t[256]")
for byte = 0, 127 do
    local character = string.char(byte)
    kind[byte] = byte <= 32 and BLANK or character:find("^%d") and DIGIT or character:find("^%a") and LETTER or PUNCTUATION
end

local is_digit = ffi.new("uint8_t[256]")
for byte = 48, 57 do
    is_digit[byte] = 1
end

local function count(counts, unit)
    local found = tonumber(bit.band(counts / unit, 0xffffULL))
    return found
end

-- Return the counts of the bytes from first to last.
local function counted(bytes, first, last)
    local counts, rest = 0ULL, first + math.floor((last - first + 1) / 8) * 8
    -- Eight at a time: the loop itself costs more than a look-up.
    for position = first, rest - 1, 8 do
        counts = counts + kind[bytes[position]] + kind[bytes[position + 1]] + kind[bytes[position + 2]]
            + kind[bytes[position + 3]] + kind[bytes[position + 4]] + kind[bytes[position + 5]]
            + kind[bytes[position + 6]] + kind[bytes[position + 7]]
    end
    for position = rest, last do
        counts = counts + kind[bytes[position]]
    end
    return counts
end

-- Return about how many tokens a body is, from the kinds of its bytes: letters, digits, punctuation, bytes above 127
-- (UTF-8) and \uXXXX escapes have each their own number of bytes per token. Long bodies are sampled evenly. Measured with
-- real tokenizers, see docs/gateway.md.
function _M.tokens(body, per_token)
    local n, counts, escapes, hex_digits = #body, 0ULL, 0, 0
    local windows = n > WINDOWS * WINDOW and WINDOWS or 1
    local size = windows == 1 and n or WINDOW
    for window = 0, windows - 1 do
        local first = windows == 1 and 0 or math.floor(window * (n - size) / (windows - 1))
        local part = body:sub(first + 1, first + size)
        local bytes = ffi.cast("const uint8_t *", part)
        counts = counts + counted(bytes, 0, size - 1)
        local escape = part:find("\\u", 1, true)
        while escape and escape + 5 <= size do
            escapes = escapes + 1
            hex_digits = hex_digits + is_digit[bytes[escape + 1]] + is_digit[bytes[escape + 2]]
                + is_digit[bytes[escape + 3]] + is_digit[bytes[escape + 4]]
            escape = part:find("\\u", escape + 6, true)
        end
    end
    -- What belongs to an escape is no letter, no digit and no punctuation.
    local letters = math.max(0, count(counts, LETTER) - 5 * escapes + hex_digits)
    local digits = count(counts, DIGIT) - hex_digits
    local punctuation, blank, escaped = count(counts, PUNCTUATION) - escapes, count(counts, BLANK), 6 * escapes
    local ascii, seen = letters + digits + punctuation + blank, size * windows
    if seen == 0 then
        return 0
    end
    local dense = ascii > seen / 2 and blank < SPARSE * ascii
    local tokens = (letters + blank) / (dense and per_token.dense or per_token.letters)
        + digits / per_token.digits + punctuation / per_token.punctuation
        + (seen - ascii - escaped) / per_token.utf8 + escaped / per_token.escaped
    local all = math.ceil(n * tokens / seen)
    return all
end

return _M
