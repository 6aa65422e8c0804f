#!/usr/bin/env bash
# The steps of the GitHub action: compare with the base, check the budgets, annotate, write the summary and one comment.
# Inputs come as MEMIR_* variables (action.yml). Needs GITHUB_EVENT_PATH, GITHUB_STEP_SUMMARY, GITHUB_OUTPUT, RUNNER_TEMP.
set -uo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
work=$(mktemp -d "${RUNNER_TEMP:-/tmp}/memir-XXXXXX")
report="$work/report.md"
steps() { python3 "$here/steps.py" "$@"; }

case "${MEMIR_FAIL_ON:=increase}" in budget | increase | inconclusive | never) ;; *)
  echo "::error title=memir::fail-on is budget, increase, inconclusive or never, not $MEMIR_FAIL_ON" && exit 2 ;;
esac
case "${MEMIR_COMMENT:=auto}" in auto | never) ;; *)
  echo "::error title=memir::comment is auto or never, not $MEMIR_COMMENT" && exit 2 ;;
esac

base=${MEMIR_BASE:-}
if [ -z "$base" ]; then
  tip=$(steps base-of-event "$GITHUB_EVENT_PATH")
  base=$([ -z "$tip" ] || git merge-base "$tip" HEAD 2>/dev/null || echo "$tip")
fi

# diff: what the change does. `.` is the checked-out tree.
diff_code=0
if [ -n "$base" ]; then
  questions=("${MEMIR_TARGET:-}")
  if [ -z "${MEMIR_TARGET:-}" ] && [ -n "${MEMIR_SCENARIOS:-}" ]; then read -ra questions <<<"$MEMIR_SCENARIOS"; fi
  number=0
  for question in "${questions[@]}"; do
    number=$((number + 1))
    arguments=("$base" .)
    [ -z "$question" ] || arguments+=("$question")
    memir diff "${arguments[@]}" --format github --also "markdown=$work/diff-$number.md" \
      --also "json=$work/diff-$number.json" --also "sarif=$work/diff-$number.sarif" 2>"$work/error"
    code=$?
    cat "$work/error" >&2
    [ -f "$work/diff-$number.md" ] || [ ! -s "$work/error" ] || { echo '```'; cat "$work/error"; echo '```'; } >"$work/diff-$number.md"
    [ "$code" -le "$diff_code" ] || diff_code=$code
  done
fi

# check: budgets and the baseline, where there is a configuration
check_code=0
if [ -z "${MEMIR_TARGET:-}" ]; then
  read -ra names <<<"${MEMIR_SCENARIOS:-}"
  memir check ${names[@]+"${names[@]}"} --format github --also "markdown=$work/check.md" --also "json=$work/check.json" \
    --also "sarif=$work/check.sarif" 2>"$work/error"
  check_code=$?
  cat "$work/error" >&2
  [ -f "$work/check.md" ] || [ ! -s "$work/error" ] || { echo '```'; cat "$work/error"; echo '```'; } >"$work/check.md"
fi

steps report "$work" >"$report"
cat "$report" >>"${GITHUB_STEP_SUMMARY:-/dev/null}"
[ -z "${MEMIR_SARIF:-}" ] || steps sarif "$work" >"$MEMIR_SARIF"
[ "$MEMIR_COMMENT" = never ] || steps comment "$report" "$GITHUB_EVENT_PATH"
steps outputs "$work" "$diff_code" "$check_code" "$report" >>"${GITHUB_OUTPUT:-/dev/null}"
steps verdict "$work" "$diff_code" "$check_code" "$MEMIR_FAIL_ON"
