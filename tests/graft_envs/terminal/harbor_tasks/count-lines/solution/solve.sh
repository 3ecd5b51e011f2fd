#!/bin/sh
wc -l < data.txt | tr -d " " > count.txt
