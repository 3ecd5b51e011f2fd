#!/bin/sh
grep '[02468]$' numbers.txt | sort -n > even.txt
grep '[13579]$' numbers.txt | sort -n > odd.txt
