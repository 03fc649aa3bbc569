# Words that cases share: `. /run/payload/lib.sh` at a case's top. Sourced, never run.
set -Eeuo pipefail

payload=/run/payload

say() { printf '== %s\n' "$*"; }
die() { printf "FAILED: %s\n" "$*" >&2; exit 1; }
trap 'code=$?; printf "FAILED: line %s: %s (exit code %s)\n" "$LINENO" "$BASH_COMMAND" "$code" >&2' ERR

# within SECONDS COMMAND...: until the command succeeds.
within() {
  local until=$((SECONDS + $1)); shift
  until "$@" > /tmp/within.out 2>&1; do
    [ "$SECONDS" -lt "$until" ] || { tail -n 20 /tmp/within.out; die "never succeeded: $*"; }
    sleep 0.05
  done
}

# equal WHAT WANTED FOUND
equal() { [ "$2" = "$3" ] || die "$1 is '$3', not '$2'"; }

# at_most WHAT BAR FOUND: decimal numbers.
at_most() {
  python3 -c 'import sys; sys.exit(not float(sys.argv[2]) <= float(sys.argv[1]))' "$2" "$3" || die "$1 is $3, more than $2"
  printf '%s: %s (bar %s)\n' "$1" "$3" "$2"
}

# field EXPRESSION: of `v`, the JSON on the input.
field() { python3 -c "import json, sys; v = json.load(sys.stdin); print($1)"; }

# install_programs: programs/ of the payload and the repository's units, as the package has them, with nothing started or configured. For cases
# that need fail points.
install_programs() {
  local name
  for name in pagedd pagedd-worker pagedd-gateway pagedctl; do ln -sf "$payload/programs/$name" "/usr/bin/$name"; done
  install -m 644 -t /usr/lib/systemd/system "$payload"/systemd/pagedd.{service,socket}
  install -m 644 "$payload/systemd/pagedd.sysusers" /usr/lib/sysusers.d/pagedd.conf
  install -m 644 "$payload/systemd/pagedd.tmpfiles" /usr/lib/tmpfiles.d/pagedd.conf
  systemd-sysusers pagedd.conf
  systemd-tmpfiles --create pagedd.conf
  systemctl daemon-reload
}

# model_file NAME: puts the payload's model (smollm2 or tiny) where the service may read it, and prints where.
model_file() {
  local to=/var/lib/pagedd/models/$1.gguf
  mkdir -p /var/lib/pagedd/models
  cp "$payload/model/$1.gguf" "$to"
  chmod 644 "$to"
  printf '%s\n' "$to"
}

# configure MODEL [LINE...]: /etc/pagedd/pagedd.yaml with one model; lines with leading blanks are of its settings, others of the top level.
configure() {
  local name=$1 line; shift
  mkdir -p /etc/pagedd
  {
    for line in "$@"; do [ "${line# }" != "$line" ] || printf '%s\n' "$line"; done
    printf 'models:\n  %s:\n    path: %s\n' "$name" "$(model_file "$name")"
    for line in "$@"; do [ "${line# }" = "$line" ] || printf '    %s\n' "${line#"${line%%[! ]*}"}"; done
  } > /etc/pagedd/pagedd.yaml
}

# unit_properties: for `systemd-run`, what pagedd needs of a unit, for cases that do without the shipped one.
unit_properties=(-p Type=notify -p NotifyAccess=main -p Delegate=yes -p FileDescriptorStoreMax=4096 -p LimitNOFILE=65536
  -p Restart=on-failure -p RestartSec=100ms -p StartLimitIntervalSec=0 -p StateDirectory=pagedd -p RuntimeDirectory=pagedd)

models_ready() { [ "$(pagedctl --json status | field 'all(m["state"]["is"] == "ready" for m in v["models"])')" = True ]; }

# add_tenant NAME [OPTION...]: sets port_NAME and key_NAME.
add_tenant() {
  local name=$1 answer; shift
  answer=$(pagedctl --json tenant add "$name" "$@")
  printf -v "port_$name" %s "$(field 'v["tenant"]["port"]' <<< "$answer")"
  printf -v "key_$name" %s "$(field 'v["key"]["key"]' <<< "$answer")"
}

# complete PORT KEY MODEL TOKENS [PROMPT]: the text of a completion, of exactly so many tokens, at temperature 0.
complete() {
  local body
  body=$(python3 -c 'import json, sys; print(json.dumps({"model": sys.argv[1], "max_tokens": int(sys.argv[2]), "prompt": sys.argv[3],
    "temperature": 0, "ignore_eos": True}))' "$3" "$4" "${5:-Once upon a time}")
  curl -sS --fail-with-body --max-time 120 "http://127.0.0.1:$1/v1/completions" -H "authorization: Bearer $2" \
    -H 'content-type: application/json' -d "$body" | field 'v["choices"][0]["text"]'
}

# chat PORT KEY MODEL QUESTION [TOKENS]: the answer's text, at temperature 0.
chat() {
  local body
  body=$(python3 -c 'import json, sys; print(json.dumps({"model": sys.argv[1], "max_tokens": int(sys.argv[3]), "temperature": 0,
    "messages": [{"role": "user", "content": sys.argv[2]}]}))' "$3" "$4" "${5:-40}")
  curl -sS --fail-with-body --max-time 120 "http://127.0.0.1:$1/v1/chat/completions" -H "authorization: Bearer $2" \
    -H 'content-type: application/json' -d "$body" | field 'v["choices"][0]["message"]["content"]'
}

# errors_logged [UNIT]: what was logged since the case began, of priority err or worse.
errors_logged() {
  journalctl --sync
  # 1 says that there are none.
  journalctl --boot --no-pager --quiet --priority=err --since="@$(cat /run/case.since)" ${1:+--unit="$1"} || [ $? = 1 ]
}

journal_clean() {
  local lines
  lines=$(errors_logged "$@")
  [ -z "$lines" ] || { printf '%s\n' "$lines"; die "the journal has errors"; }
}
