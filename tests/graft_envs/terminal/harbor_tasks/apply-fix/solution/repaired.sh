echo "$GREETING $1"
