#!/bin/sh
# half of the reward for each file
same() { if cmp -s "$1" "/tests/expected/$1"; then echo 0.5; else echo 0; fi; }
even=$(same even.txt) odd=$(same odd.txt)
case $even$odd in 0.50.5) reward=1 ;; 00) reward=0 ;; *) reward=0.5 ;; esac
echo "{\"reward\": $reward, \"even\": $even, \"odd\": $odd}" > /logs/verifier/reward.json
echo 0 > /logs/verifier/reward.txt # reward.json counts
