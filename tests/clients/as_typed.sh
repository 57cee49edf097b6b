#!/usr/bin/env bash
# What docs/http.md tells to type to try the example, in its order. The server at $1 runs already.
set -euo pipefail
shopt -s inherit_errexit
at=${1#http://}
cd "$(dirname "$0")/../.."

cargo() { :; }
curl() {
    case "$*" in
    # It goes on for ever, and has shown what it has by then.
    *feed=continuous*) command curl -sS --no-buffer -m 3 "${@//localhost:5984/$at}" || [ $? = 28 ] ;;
    *) command curl -sS --fail-with-body "${@//localhost:5984/$at}" ;;
    esac
}

typed=$(awk '/^```/ { inside = ($0 == "```sh mini_couch"); next } inside' docs/http.md)
seen=$(eval "$typed")
printf '%s\n' "$seen"
grep -q '"db_name":"shop".*"type":"created"' <<<"$seen"
grep -q '"price":3' <<<"$seen"
