#!/bin/sh
# An agent: it asks for a command, runs it and shows its output, until the answer is "done".
# $1: the task. Commands and outputs have neither quotes nor backslashes.
say() { printf '{"role": "%s", "content": "%s"}' "$1" "$2"; }

messages=$(say user "$1")
while :; do
	answer=$(wget -q -O - --header "Authorization: Bearer $OPENAI_API_KEY" --header "Content-Type: application/json" \
		--post-data "{\"model\": \"policy\", \"messages\": [$messages]}" "$OPENAI_BASE_URL/chat/completions") || exit 3
	command=$(echo "$answer" | sed -n 's/.*"content": *"\([^"]*\)".*/\1/p')
	[ "$command" = done ] && exit 0
	output=$(sh -c "$command" 2>&1 | tr '\n"\\' '   ')
	messages="$messages, $(say assistant "$command"), $(say user "$output")"
done
