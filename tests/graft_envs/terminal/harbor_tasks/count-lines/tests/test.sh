#!/bin/sh
if [ "$(cat count.txt)" = 12 ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
