"""Several engines in child processes that are used like a single generator (`driver=live`).

`fleet` combines the parts: `ledger` tracks which engine has which rollout, `engines` starts and replaces engines,
`transport` and `wire` carry messages to the children, `server` is the child's side, `weights` stores published weights,
and `addresses` parses `driver.engines`.
"""
