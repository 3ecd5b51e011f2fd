from graft.cli import main

main()
