#!/usr/bin/env bash
# Checks and measures on a host that has a GPU and its driver. Needs no root and no compiler; Python 3 for what goes over HTTP alone.
#
#   run.sh                all groups of rows.txt, then the table
#   run.sh GROUP...       these groups, then the table
#   run.sh list           groups and what is in them
#   run.sh table          the table of what has been measured
#
# It ends with 1 where a run failed; a bar that is missed is no failure.
# Results lie in results/, a log and a JSON file for each run; RESULTS=FOLDER names another folder. GPU=N takes another GPU than the first.
set -uo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
cd "$here" || exit 1
results=${RESULTS:-$here/results}
export PATH=$here/bin:$PATH
gpu=${GPU:-0}

# rows.txt, without comments: fields between `|`, blanks around them off.
rows() { sed -e '/^ *#/d' -e '/^ *$/d' -e 's/ *| */|/g' -e 's/^ *//' -e 's/ *$//' rows.txt; }

# CUDA's libraries where the loader does not know them.
find_libraries() {
  local name folder known=${LD_LIBRARY_PATH:-}
  for name in libcuda.so.1 libcublasLt.so.13; do
    /sbin/ldconfig -p 2>/dev/null | grep -q -F "$name" && continue
    for folder in ${known//:/ } /usr/local/cuda/lib64 /usr/local/cuda-13*/lib64 /usr/local/nvidia/lib64 /usr/lib/x86_64-linux-gnu \
      $(python3 -c 'import sys; [print(f"{p}/nvidia/cu13/lib {p}/nvidia/cublas/lib") for p in sys.path if p]' 2>/dev/null); do
      if [ -e "$folder/$name" ]; then
        export LD_LIBRARY_PATH=$folder${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
        continue 2
      fi
    done
    echo "run.sh: $name is nowhere: a GPU cannot be used, or not in full" >&2
  done
}

# run NAME SECONDS COMMAND...: into results/NAME.log, its exit code into NAME.code.
run() {
  local name=$1 seconds=$2 start=$SECONDS; shift 2
  printf '== %s: %s\n' "$name" "$*"
  rm -f "$results/$name.json"
  timeout --kill-after=20 "$seconds" "$@" 2>&1 | tee "$results/$name.log"
  local code=${PIPESTATUS[0]}
  echo "$code" > "$results/$name.code"
  case $code in
    0) ;;
    124 | 137) failed=1; echo "run.sh: $name took longer than its $seconds s" >&2 ;;
    *) failed=1; echo "run.sh: $name ended with exit code $code" >&2 ;;
  esac
  printf '   %s s\n' $((SECONDS - start))
}

group() {
  local kind group seconds name command words where known=
  while IFS='|' read -r kind group seconds name command; do
    [ "$kind" = run ] && [ "$group" = "$1" ] || continue
    known=1
    read -r -a words <<< "${command//cuda:0/cuda:$gpu}"
    case ${words[0]} in
      bench) run "$name" "$seconds" pagedd "${words[@]}" --json "$results/$name.json" ;;
      http | faults | hf)
        where=(--binaries bin)
        if [ "${words[0]}" = hf ]; then where=(--results "$results"); fi
        if command -v python3 > /dev/null; then
          run "$name" "$seconds" python3 "bench/gpu_${words[0]}.py" "${where[@]}" "${words[@]:1}" --json "$results/$name.json"
        else
          echo "== $name: left out, there is no python3"
        fi ;;
      ./*) if [ -x "${words[0]}" ]; then run "$name" "$seconds" "${words[@]}"; else echo "== $name: ${words[0]} is not in this bundle"; fi ;;
      *) run "$name" "$seconds" "${words[@]}" ;;
    esac
  done < <(rows)
  [ "$known" ] || { echo "run.sh: there is no group $1: ./run.sh list" >&2; return 1; }
}

# figure NAME "KEY=VALUE..." FIELD: of the row of results/NAME.json that has these, or the exit code.
figure() {
  local file=$results/$1.json line pair
  if [ "$3" = exit ]; then cat "$results/$1.code" 2>/dev/null; return; fi
  [ -f "$file" ] || return
  line=$(grep '^  {' "$file")
  for pair in $2; do line=$(grep -E "\"${pair%%=*}\": \"?${pair#*=}\"?[,}]" <<< "$line"); done
  sed -n "s/.*\"$3\": \"\{0,1\}\([^,}\"]*\)\"\{0,1\}[,}].*/\1/p" <<< "$line" | head -1
}

# A number as people read it: three digits behind the point below 100, one above.
short() { awk -v n="$1" 'BEGIN { if (n + 0 != n) print n; else if (n == int(n)) print n; else printf (n < 100 ? "%.3f\n" : "%.1f\n"), n }'; }

table() {
  local kind name where field relation bar peer says value verdict stated part met=0 missed=0 unknown=0
  printf '\n%-58s %9s %9s %-7s %-16s %s\n' what measured bar '' vLLM 'sampling, cache, budget, warm-up, W, MHz'
  while IFS='|' read -r kind name where field relation bar peer says; do
    [ "$kind" = show ] || continue
    value=$(figure "$name" "$where" "$field")
    if [ -z "$value" ] || [ "$value" = null ]; then
      unknown=$((unknown + 1))
      continue
    elif [ "$relation" = '-' ]; then
      verdict=
    elif awk -v a="$value" -v b="$bar" -v r="$relation" 'BEGIN { exit !(r == "<=" ? a <= b : r == ">=" ? a >= b : a == b) }'; then
      verdict=met met=$((met + 1))
    else
      verdict=MISSED missed=$((missed + 1))
    fi
    stated=
    if [ "$field" != exit ]; then
      for part in sampling prefix_cache max_num_batched_tokens warmup_steps gpu_watts gpu_sm_mhz; do
        part=$(figure "$name" "$where" "$part")
        stated+="${stated:+, }$(short "${part/null/-}")"
      done
    fi
    [ "$relation" = '-' ] && bar='-' relation=
    printf '%-58s %9s %9s %-7s %-16s %s\n' "$says" "$(short "$value")" "$relation $bar" "$verdict" "${peer:--}" "$stated"
  done < <(rows)
  printf '%s met, %s missed, %s not measured\n' "$met" "$missed" "$unknown"
}

case ${1:-} in
  list) rows | awk -F'|' '$1 == "run" { printf "%-12s %4s s  %-16s %s\n", $2, $3, $4, $5 }'; exit ;;
  table) table; exit ;;
  -*) sed -n '2,/^set/p' "$here/run.sh" | sed -n 's/^# \{0,1\}//p'; exit 2 ;;
esac
mkdir -p "$results" || exit 1
find_libraries
nvidia-smi --query-gpu=name,driver_version,memory.total,power.limit,clocks.max.sm --format=csv,noheader -i "$gpu" 2>/dev/null \
  || echo "run.sh: there is no nvidia-smi: rows will have no power and no clock" >&2
failed=0
if [ $# -gt 0 ]; then groups=$*; else groups=$(rows | awk -F'|' '$1 == "run" && !seen[$2]++ { print $2 }'); fi
for each in $groups; do group "$each" || failed=1; done
table | tee "$results/table.txt"
exit "$failed"
