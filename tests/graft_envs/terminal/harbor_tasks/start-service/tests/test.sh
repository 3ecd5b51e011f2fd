#!/bin/sh
rm -f /data/state/beat
sleep 1
if [ -f /data/state/beat ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
