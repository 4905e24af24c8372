"""The subcommands of ``attnlaws``, one module per part; each imports what it needs when it runs."""
