-- A completion with a prompt of about 1.3 kB. PAUSE_MS, where set, is the mean pause of each connection between two requests.
local pause = tonumber(os.getenv("PAUSE_MS") or "0")
wrk.method = "POST"
wrk.headers["Content-Type"] = "application/json"
wrk.headers["Authorization"] = "Bearer " .. os.getenv("KEY")
wrk.body = '{"model":"smollm2","max_tokens":64,"prompt":"' .. ("The quick brown fox jumps over it. "):rep(36) .. '"}'

if pause > 0 then
    function delay()
        return math.random(0, 2 * pause)
    end
end

function done(summary, latency)
    local errors = summary.errors
    io.write(string.format('{"requests":%d,"seconds":%f,"p50_ms":%f,"p99_ms":%f,"errors":%d}\n', summary.requests,
        summary.duration / 1e6, latency:percentile(50) / 1e3, latency:percentile(99) / 1e3,
        errors.connect + errors.read + errors.write + errors.status + errors.timeout))
end
