#!/usr/bin/env bash
# Runs the commands with which docs/http.md tries the example, in their order. The server at $1 is already running.
set -euo pipefail
shopt -s inherit_errexit
at=${1#http://}
cd "$(dirname "$0")/../.."

cargo() { :; }
curl() {
    case "$*" in
    # This feed never ends, so it is cut off after 3 s. By then it has sent the existing rows.
    *feed=continuous*) command curl -sS --no-buffer -m 3 "${@//localhost:5984/$at}" || [ $? = 28 ] ;;
    *) command curl -sS --fail-with-body "${@//localhost:5984/$at}" ;;
    esac
}

typed=$(awk '/^```/ { inside = ($0 == "```sh mini_couch"); next } inside' docs/http.md)
seen=$(eval "$typed")
printf '%s\n' "$seen"
grep -q '"db_name":"shop".*"type":"created"' <<<"$seen"
grep -q '"price":3' <<<"$seen"
