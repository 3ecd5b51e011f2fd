#!/bin/sh
tr a-z A-Z < letter.txt > loud.txt
