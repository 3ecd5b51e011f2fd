#!/bin/sh
[ "$LEVEL" = basic ] || exit 1
if [ "$(sh greet.sh graft)" = "$EXPECTED" ]; then echo 1.0; else echo 0.0; fi > /logs/verifier/reward.txt
