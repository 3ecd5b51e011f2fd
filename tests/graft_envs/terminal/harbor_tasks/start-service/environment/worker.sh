while :; do echo alive > $STATE/beat; sleep 0.2; done
