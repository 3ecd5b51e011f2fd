#!/bin/sh
if [ "$(cat answer.txt)" = yes ]; then echo '{"correct": 1}'; else echo '{"correct": 0}'; fi > /logs/verifier/reward.json
