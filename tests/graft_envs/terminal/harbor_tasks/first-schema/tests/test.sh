#!/bin/sh
if grep -qx 'DEAR READER' loud.txt; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
