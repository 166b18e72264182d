//! The `workpump` program: migrate, look, enqueue, relay, and a demo that checks the whole way of a message.

mod age;
mod cli;

use std::process::ExitCode;

fn main() -> ExitCode {
    cli::main()
}
