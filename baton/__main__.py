from baton.cli.entry import main

main()
