//! What a session asks of the server when it starts, so that the server notices a client whose host is gone.
//!
//! The rule: limits are start-up options, because they must hold before the first statement and survive nothing. The failure this prevents:
//! a backend without a client that keeps an alive-lock, or the row locks of half a claim, for the two hours after which TCP asks.
//!
//! A pooler refuses start-up options or keeps them to itself. A server that cannot set one of them names it in its refusal, and is asked
//! again without.

use std::time::Duration;

use tokio_postgres::error::SqlState;
use tokio_postgres::{Client, Config, Connection, NoTls, Socket, tls::NoTlsStream};
use tracing::debug;

/// Longer than the client's own limits in `session.rs`, so that the client notices first. All are needed: keepalives ask while nothing is
/// under way, the user timeout ends an answer that nobody takes, and the check interval ends a statement that nobody waits for.
pub(crate) const SERVER_LIMITS: [(&str, &str); 5] = [
    ("tcp_keepalives_idle", "5"),
    ("tcp_keepalives_interval", "2"),
    ("tcp_keepalives_count", "3"),
    ("tcp_user_timeout", "10000"),
    ("client_connection_check_interval", "2s"),
];

/// Start-up options, with values in the form in which the server shows them.
#[derive(Clone, Debug)]
pub(crate) struct Limits(Vec<(&'static str, String)>);

impl Limits {
    /// The limits of every session; `statement` in whole seconds below a minute, or none.
    pub(crate) fn new(statement: Option<Duration>) -> Self {
        let mut limits = Self(SERVER_LIMITS.map(|(name, value)| (name, value.to_owned())).to_vec());
        limits.add("statement_timeout", shown(statement));
        limits
    }

    /// One more.
    pub(crate) fn add(&mut self, name: &'static str, value: impl Into<String>) {
        self.0.push((name, value.into()));
    }

    /// Names and values that the server took, after [`Limits::connect`].
    pub(crate) fn taken(&self) -> &[(&'static str, String)] {
        &self.0
    }

    /// Opens a session that carries them. What the server cannot set is left out, and no longer among [`Limits::taken`].
    pub(crate) async fn connect(
        &mut self,
        config: &Config,
    ) -> Result<(Client, Connection<Socket, NoTlsStream>), tokio_postgres::Error> {
        loop {
            let refused = match self.on(config).connect(NoTls).await {
                Ok(session) => return Ok(session),
                Err(error) => error,
            };
            let Some(at) = self.at_fault(&refused) else { return Err(refused) };
            debug!(setting = self.0[at].0, "the server cannot set a limit for its sessions");
            self.0.remove(at);
        }
    }

    /// The URL's own options first: the last one wins.
    fn on(&self, config: &Config) -> Config {
        let mut options = config.get_options().unwrap_or_default().to_owned();
        for (name, value) in &self.0 {
            options = format!("{options} -c {name}={value}");
        }
        let mut limited = config.clone();
        limited.options(options.trim_start());
        limited
    }

    /// Which option a server complains about, if that is what it does.
    fn at_fault(&self, error: &tokio_postgres::Error) -> Option<usize> {
        let error = error.as_db_error()?;
        self.named(error.code(), error.message())
    }

    fn named(&self, code: &SqlState, message: &str) -> Option<usize> {
        let about_a_setting = *code == SqlState::UNDEFINED_OBJECT
            || *code == SqlState::INVALID_PARAMETER_VALUE
            || *code == SqlState::INSUFFICIENT_PRIVILEGE
            || *code == SqlState::CANT_CHANGE_RUNTIME_PARAM;
        // Names are not translated, whatever language the server speaks.
        self.0.iter().position(|(name, _)| about_a_setting && message.contains(&format!("\"{name}\"")))
    }
}

/// A time limit as the server shows it.
fn shown(limit: Option<Duration>) -> String {
    limit.map_or_else(|| "0".to_owned(), |limit| format!("{}s", limit.as_secs()))
}

/// The configuration with a limit for statements and nothing else, for pooled sessions.
pub(crate) fn with_statement_timeout(config: &Config, statement: Duration) -> Config {
    Limits(vec![("statement_timeout", shown(Some(statement)))]).on(config)
}

/// Whether this is how a pooler says that it takes no start-up options (PgBouncer the first, RDS Proxy the second).
pub(crate) fn refuses_options(error: &tokio_postgres::Error) -> bool {
    error
        .code()
        .is_some_and(|code| *code == SqlState::PROTOCOL_VIOLATION || *code == SqlState::FEATURE_NOT_SUPPORTED)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_of_the_url_are_kept_and_come_first() {
        let mut config = Config::new();
        config.options("-c lock_timeout=1s");
        let options = with_statement_timeout(&config, Duration::from_secs(20));
        assert_eq!(options.get_options(), Some("-c lock_timeout=1s -c statement_timeout=20s"));
        let options = Limits::new(None).on(&Config::new());
        assert!(options.get_options().unwrap().starts_with("-c tcp_keepalives_idle=5 -c tcp_"));
    }

    #[test]
    fn a_setting_is_only_given_up_when_the_server_names_it() {
        let limits = Limits::new(None);
        let unknown = "unrecognized configuration parameter \"client_connection_check_interval\"";
        assert_eq!(limits.named(&SqlState::UNDEFINED_OBJECT, unknown), Some(4));
        assert_eq!(limits.named(&SqlState::PROTOCOL_VIOLATION, unknown), None);
        assert_eq!(
            limits.named(&SqlState::INVALID_PARAMETER_VALUE, "invalid value for parameter \"x\""),
            None
        );
        assert_eq!(limits.named(&SqlState::UNDEFINED_OBJECT, "role \"me\" does not exist"), None);
    }
}
