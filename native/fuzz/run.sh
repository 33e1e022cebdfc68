#!/usr/bin/env bash
# Runs each fuzz target for some seconds: native/fuzz/run.sh DIRECTORY_OF_TARGETS SECONDS OUT
# Exit status 1 when a target failed; its input and its log are kept in OUT.
set -euo pipefail
binaries=$1 seconds=$2 out=$3
corpus=$(dirname "$0")/corpus
failed=
for kept in "$corpus"/*/; do
  name=$(basename "$kept")
  mkdir -p "$out/$name"
  result="no failure"
  # New inputs go into the first directory.
  "$binaries/${name}_fuzz" "$out/$name" "$kept" -max_total_time="$seconds" -max_len=1000 \
    -timeout=20 -rss_limit_mb=2048 -artifact_prefix="$out/failed_${name}_" \
    >"$out/$name.log" 2>&1 || { result=failed failed+=" $name"; }
  echo "$name: $result; $(grep -E '^Done ' "$out/$name.log" || true)" \
    "$(grep -oE 'cov: [0-9]+ ft: [0-9]+' "$out/$name.log" | tail -n 1 || true)"
done
test -z "$failed" || { echo "failed:$failed; see $out" >&2; exit 1; }
