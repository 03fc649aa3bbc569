#!/usr/bin/env bash
# A real model, two tenants, two ports: builds, starts pagedd under a temporary state directory, adds two tenants, streams a
# chat answer from each, compares one with a reference engine's, shows the status, and stops. KEEP=1 leaves it running.
set -euo pipefail
. "$(dirname "$0")/lib.sh"
cd "$root"
need_rust
need_compiler
need python3 python3

say "Model"
model=$(scripts/fetch_model.sh)
echo "$model"

say "Build (release; the first time takes minutes)"
cargo build --locked --release --workspace --bins
bin=${CARGO_TARGET_DIR:-$root/target}/release

work=$(mktemp -d "${TMPDIR:-/tmp}/pagedd-demo.XXXXXX")
log=$work/pagedd.log
pid=

finish() {
  local code=$?
  trap - EXIT INT TERM
  if [ -n "$pid" ]; then
    kill "$pid" 2>/dev/null || true
    for _ in $(seq 100); do kill -0 "$pid" 2>/dev/null || break; sleep 0.1; done
    kill -9 "$pid" 2>/dev/null || true
  fi
  if [ "$code" != 0 ] && [ -f "$log" ]; then
    printf -- '-- last lines of the log --\n' >&2
    tail -n 40 "$log" >&2
  fi
  rm -rf "$work"
  exit "$code"
}
trap finish EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

cat > "$work/pagedd.yaml" <<YAML
models:
  smollm2:
    path: $model
    kv_memory: 16384 tokens
  # The same file computed in float32 throughout: slower, and comparable with a reference word for word.
  smollm2-f32:
    path: $model
    dtype: f32
    kv_dtype: f32
    kv_memory: 8192 tokens
YAML

say "pagedd --config $work/pagedd.yaml --state-dir $work/state"
# Left running, it is to outlive the terminal.
launch=()
[ -z "${KEEP:-}" ] || launch=(setsid)
"${launch[@]}" "$bin/pagedd" --config "$work/pagedd.yaml" --state-dir "$work/state" < /dev/null > "$log" 2>&1 &
pid=$!

pagedctl() { "$bin/pagedctl" --socket "$work/state/admin.sock" "$@"; }
# field PYTHON: an expression over `v`, the JSON on the input.
field() { python3 -c "import json, sys; v = json.load(sys.stdin); print($1)"; }

start=$SECONDS
until [ "$(pagedctl --json status 2>/dev/null | field 'all(m["state"]["is"] == "ready" for m in v["models"])' 2>/dev/null)" = True ]; do
  kill -0 "$pid" 2>/dev/null || { wait "$pid" || true; pid=; die "pagedd ended before it was ready"; }
  [ $((SECONDS - start)) -lt 120 ] || die "pagedd is not ready after two minutes"
  sleep 0.1
done
echo "ready"

say "pagedctl tenant add"
add() { # NAME MODEL FLOOR CEILING: sets port_NAME and key_NAME
  local answer
  answer=$(pagedctl --json tenant add "$1" --model "$2" --kv-floor "$3" --kv-ceiling "$4")
  printf -v "port_$1" %s "$(field 'v["tenant"]["port"]' <<<"$answer")"
  printf -v "key_$1" %s "$(field 'v["key"]["key"]' <<<"$answer")"
}
add acme smollm2 20% 50%
add globex smollm2-f32 20% 100%
pagedctl tenant list

wait_port() { # PORT
  python3 - "$1" <<'PY'
import sys, time, urllib.error, urllib.request

for _ in range(600):
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{sys.argv[1]}/readyz", timeout=5):
            sys.exit(0)
    except (urllib.error.URLError, OSError):
        time.sleep(0.05)
sys.exit(f"port {sys.argv[1]} is not ready")
PY
}
wait_port "$port_acme"
wait_port "$port_globex"

stream() { # PORT KEY BODY
  local url=http://127.0.0.1:$1/v1/chat/completions
  if command -v curl >/dev/null 2>&1; then
    curl -sSN --max-time 300 "$url" -H "authorization: Bearer $2" -H 'content-type: application/json' -d "$3"
  else
    python3 scripts/stream.py post "$url" "$2" "$3"
  fi | python3 scripts/stream.py show
}

body() { # MODEL QUESTION MAX_TOKENS
  python3 -c '
import json, sys
model, question, tokens = sys.argv[1:]
print(json.dumps({"model": model, "messages": [{"role": "user", "content": question}], "temperature": 0,
                  "max_tokens": int(tokens), "stream": True}))' "$@"
}

say "acme, port $port_acme: Why is the sky blue?"
stream "$port_acme" "$key_acme" "$(body smollm2 'Why is the sky blue? Answer in two sentences.' 80)"
echo

# A prompt of the reference file, with the float32 continuation of an independent engine.
reference() {
  python3 - "$1" <<'PY'
import json, sys

prompts = json.load(open("tests/fixtures/reference/greedy.json", encoding="utf8"))["prompts"]
prompt = next(p for p in prompts if p["id"] == "chat_default_system")
print({"question": prompt["messages"][-1]["content"], "answer": prompt["hf_fp32"]["text"]}[sys.argv[1]])
PY
}
question=$(reference question)
say "globex, port $port_globex, in float32: $question"
stream "$port_globex" "$key_globex" "$(body smollm2-f32 "$question" 48)" | tee "$work/answer"
echo
if [ "$(cat "$work/answer")" = "$(reference answer)" ]; then
  echo "(equal to the reference continuation, word for word)"
else
  printf 'the reference says: %s\n' "$(reference answer)" >&2
  die "the float32 answer differs from the reference"
fi

say "pagedctl status"
pagedctl status

if [ -n "${KEEP:-}" ]; then
  trap - EXIT INT TERM
  disown "$pid"
  cat <<TEXT
== Left running. Try:
curl -N http://127.0.0.1:$port_acme/v1/chat/completions -H 'authorization: Bearer $key_acme' -H 'content-type: application/json' \\
  -d '{"model": "smollm2", "stream": true, "temperature": 0, "max_tokens": 200, "messages": [{"role": "user", "content": "Tell me about Paris."}]}'
curl -N http://127.0.0.1:$port_globex/v1/chat/completions -H 'authorization: Bearer $key_globex' -H 'content-type: application/json' \\
  -d '{"model": "smollm2-f32", "stream": true, "temperature": 0, "max_tokens": 200, "messages": [{"role": "user", "content": "Tell me about Rome."}]}'
$bin/pagedctl --socket $work/state/admin.sock status
log: $log
stop and clean up: kill $pid; rm -rf $work
TEXT
  exit 0
fi

say "Stop (SIGTERM)"
kill -TERM "$pid"
code=0
wait "$pid" || code=$?
pid=
[ "$code" = 0 ] || die "pagedd ended with exit code $code"
echo "pagedd ended with exit code 0"
