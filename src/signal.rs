//! Signals of the user's program: sent in a transaction, heard by whoever listens. For users: `docs/signals.md`.
//!
//! The rule: a signal is a hint. It is sent with the caller's transaction or not at all, it reaches whoever listens or nobody, and a
//! subscriber is told whenever it may have missed one. The failure this prevents: a cache that stays stale for good because the one
//! session that listened was being opened again.

mod hub;
mod stream;

use std::fmt;
use std::marker::PhantomData;
use std::sync::Arc;

use serde::Serialize;
use serde::de::DeserializeOwned;
use sha2::{Digest, Sha256};
use tokio_postgres::GenericClient;
use tokio_postgres::types::Type;

pub use workpump_actors::message::{Heard, Subscribe, Unsubscribe};

pub(crate) use hub::{Hub, HubActor};
pub use stream::Signals;

use crate::enqueue::Producer;
use crate::pg::fault::describe;
use crate::pg::schema_name::SchemaName;
use crate::pg::statement::direct::NOTIFY;

/// How every channel of a signal begins. Those on which the pump itself is rung begin with `wh_work_`.
const PREFIX: &str = "wh_sig_";
/// Hexadecimal digits that tell the schemas of a database apart.
const TAG: usize = 16;
/// What a channel can be called: LISTEN cuts off the rest, and NOTIFY refuses it.
const MAX_CHANNEL: usize = 63;

/// Why a topic was refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum BadTopic {
    /// It has no name.
    #[error("a topic is empty: say what its signals are about, such as cache.invalidated")]
    Empty,
    /// PostgreSQL would not keep the name of its channel.
    #[error(
        "topic {name:?} takes {bytes} bytes, {limit} are allowed, so that PostgreSQL keeps the name of its channel: shorten it"
    )]
    TooLong {
        /// The topic as given.
        name: String,
        /// What it takes.
        bytes: usize,
        /// What is allowed.
        limit: usize,
    },
    /// It has a character that is not allowed.
    #[error("topic {name:?} contains {character:?} at byte {at}: use A to Z, a to z, 0 to 9, and . _ - /")]
    Character {
        /// The topic as given.
        name: String,
        /// The first character that is not allowed.
        character: char,
        /// Where it stands.
        at: usize,
    },
}

/// Why a signal was not sent.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SignalError {
    /// Its value does not serialize.
    #[error("the value for topic {topic} is not JSON: {cause}")]
    NotJson {
        /// The topic.
        topic: String,
        /// What the serializer said.
        cause: String,
    },
    /// Its value is larger than NOTIFY takes. Nothing was sent, and the caller's transaction is as it was.
    #[error(
        "the value for topic {topic} takes {bytes} bytes as JSON, {limit} are allowed: store it, and send a reference"
    )]
    TooLarge {
        /// The topic.
        topic: String,
        /// What it takes.
        bytes: usize,
        /// What is allowed.
        limit: usize,
    },
    /// The database refused. The caller's transaction is aborted: roll it back.
    #[error("the signal for topic {topic} was refused ({code}): {message}")]
    Database {
        /// The topic.
        topic: String,
        /// The SQLSTATE, or `client` for errors before the server answered.
        code: String,
        /// What the server said.
        message: String,
        /// The driver's error.
        #[source]
        source: tokio_postgres::Error,
    },
}

/// What signals are about, and the type of their values. Cheap to clone; make it once and share it between who sends and who hears.
pub struct Topic<T> {
    name: Arc<str>,
    value: PhantomData<fn(T) -> T>,
}

impl<T> Topic<T> {
    /// Bytes in the name of a topic at most: what is left of a channel's 63.
    pub const MAX_BYTES: usize = MAX_CHANNEL - PREFIX.len() - TAG - 1;

    /// A topic of this name, for values of this type. Names are compared exactly: `Cache` and `cache` are two topics.
    ///
    /// # Errors
    ///
    /// When the name is empty, longer than [`MAX_BYTES`](Self::MAX_BYTES), or has a character that is no ASCII letter, no digit, and none
    /// of `. _ - /`. A name is never shortened: two topics never share a channel.
    pub fn new(name: &str) -> Result<Self, BadTopic> {
        let (name, limit) = (name.to_owned(), Self::MAX_BYTES);
        let stray = name.char_indices().find(|(_, c)| !c.is_ascii_alphanumeric() && !".-_/".contains(*c));
        match stray {
            _ if name.is_empty() => Err(BadTopic::Empty),
            Some((at, character)) => Err(BadTopic::Character { name, character, at }),
            None if name.len() > limit => Err(BadTopic::TooLong { bytes: name.len(), name, limit }),
            None => Ok(Self { name: name.into(), value: PhantomData }),
        }
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.name
    }
}

impl<T> Clone for Topic<T> {
    fn clone(&self) -> Self {
        Self { name: Arc::clone(&self.name), value: PhantomData }
    }
}

impl<T> fmt::Debug for Topic<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Topic").field(&self.name).finish()
    }
}

/// What a subscriber is told.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Signal<T> {
    /// From now on this topic is listened to: for the first time, or again on a new session. Signals may have been missed before: look at
    /// the state that they are about.
    Listening,
    /// Somebody sent this.
    Value(T),
    /// Somebody sent what is no `T`: an older or a newer version of the program, or a NOTIFY by hand.
    Undecodable {
        /// What was sent.
        payload: Arc<str>,
        /// Why it is no `T`.
        error: String,
    },
    /// This subscriber is too slow: so many of its oldest signals were thrown away at this place. Look at the state, as after
    /// [`Listening`](Self::Listening).
    Missed {
        /// How many.
        signals: u64,
    },
}

impl<T: DeserializeOwned> From<Heard> for Signal<T> {
    fn from(heard: Heard) -> Self {
        match heard {
            Heard::Listening { .. } => Self::Listening,
            Heard::Rung { payload, .. } => match serde_json::from_str(&payload) {
                Ok(value) => Self::Value(value),
                Err(error) => Self::Undecodable { payload, error: error.to_string() },
            },
        }
    }
}

/// How the channels of one schema are called: `wh_sig_<topic>` in `public`, `wh_sig_<tag>:<topic>` elsewhere. No topic has a colon, so
/// none of one schema is ever the channel of another.
#[derive(Debug, Clone)]
pub(crate) struct Channels(String);

impl Channels {
    pub(crate) fn of(schema: &SchemaName) -> Self {
        if schema.as_str() == "public" {
            return Self(PREFIX.to_owned());
        }
        let digest = Sha256::digest(schema.as_str());
        let start = digest.iter().take(TAG / 2).fold(0_u64, |number, byte| (number << 8) | u64::from(*byte));
        Self(format!("{PREFIX}{start:0TAG$x}:"))
    }

    pub(crate) fn channel<T>(&self, topic: &Topic<T>) -> Arc<str> {
        format!("{}{}", self.0, topic.name).into()
    }
}

impl Producer {
    /// The largest value of a signal, as JSON: what NOTIFY takes.
    pub const MAX_SIGNAL_BYTES: usize = 7_999;

    /// Sends a signal when the caller's transaction commits; never when it does not. Through any client or transaction, also one that goes
    /// through a pooler; outside of a transaction it is sent at once. One trip.
    ///
    /// Who hears it: every [`WorkPump::subscribe`](crate::WorkPump::subscribe) of the topic in pumps of the same schema whose direct session
    /// listens at that moment. PostgreSQL tells a value that was sent several times in one transaction once. All commits that signal wait
    /// for each other for a moment in one queue of the server, so signal what changed, not each row of it.
    pub async fn signal<T: Serialize, C: GenericClient + Sync>(
        &self,
        client: &C,
        topic: &Topic<T>,
        value: &T,
    ) -> Result<(), SignalError> {
        let name = || topic.name.to_string();
        let payload = serde_json::to_string(value)
            .map_err(|error| SignalError::NotJson { topic: name(), cause: error.to_string() })?;
        let (bytes, limit) = (payload.len(), Self::MAX_SIGNAL_BYTES);
        if bytes > limit {
            return Err(SignalError::TooLarge { topic: name(), bytes, limit });
        }
        let channel = self.channel(topic);
        let sent = client.execute_typed(NOTIFY, &[(&&*channel, Type::TEXT), (&payload, Type::TEXT)]).await;
        sent.map(drop).map_err(|source| SignalError::Database {
            topic: name(),
            code: source.code().map_or_else(|| "client".to_owned(), |code| code.code().to_owned()),
            message: describe(&source),
            source,
        })
    }

    /// The channel of a topic in this schema: for actors, which [`Subscribe`] to it, and for programs that NOTIFY and LISTEN by themselves.
    pub fn channel<T>(&self, topic: &Topic<T>) -> Arc<str> {
        self.channels().channel(topic)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn channel(schema: &str, topic: &str) -> String {
        let channels = Channels::of(&SchemaName::new(schema).unwrap());
        channels.channel(&Topic::<()>::new(topic).unwrap()).to_string()
    }

    #[test]
    fn topics_that_could_be_misread_are_refused_by_name_and_reason() {
        let refused = |name: &str| Topic::<()>::new(name).unwrap_err();
        assert_eq!(refused(""), BadTopic::Empty);
        let (name, limit) = ("x".repeat(40), 39);
        assert_eq!(refused(&name), BadTopic::TooLong { name, bytes: 40, limit });
        for (name, character, at) in
            [("a b", ' ', 1), ("a:b", ':', 1), ("\"", '"', 0), ("straße", 'ß', 4), ("a\0", '\0', 1)]
        {
            assert_eq!(refused(name), BadTopic::Character { name: name.to_owned(), character, at });
        }
        let text = refused(&"x".repeat(99)).to_string();
        assert!(text.contains("99 bytes, 39 are allowed"), "{text}");
        assert_eq!(Topic::<()>::new("Cache/v1_a-b.C").unwrap().name(), "Cache/v1_a-b.C");
    }

    #[test]
    fn the_longest_topic_of_the_longest_schema_is_a_name_that_postgres_keeps() {
        let topic = "x".repeat(Topic::<()>::MAX_BYTES);
        assert_eq!(channel(&"s".repeat(63), &topic).len(), MAX_CHANNEL);
        assert!(channel("public", &topic).len() <= MAX_CHANNEL);
    }

    #[test]
    fn no_topic_is_the_channel_of_another_schema_or_of_the_pump() {
        assert_eq!(channel("public", "cache.invalidated"), "wh_sig_cache.invalidated");
        let elsewhere = channel("other", "a");
        assert_eq!(elsewhere, "wh_sig_d9298a10d1b07358:a");
        // What stands behind the prefix of `public` would have to be a topic.
        assert!(Topic::<()>::new(elsewhere.strip_prefix(PREFIX).unwrap()).is_err());
        assert_ne!(channel("other", "a"), channel("another", "a"));
        for topic in ["wh_work_1", "work_", "a"] {
            assert!(!channel("public", topic).starts_with("wh_work_"));
        }
    }

    #[test]
    fn what_is_heard_is_read_as_the_type_of_the_topic() {
        let rung = |payload: &str| Heard::Rung { channel: "c".into(), payload: payload.into() };
        assert_eq!(Signal::<u8>::from(rung("7")), Signal::Value(7));
        assert_eq!(Signal::<u8>::from(Heard::Listening { channel: "c".into() }), Signal::Listening);
        let Signal::<u8>::Undecodable { payload, error } = rung("700").into() else { panic!("700 is no u8") };
        assert!(&*payload == "700" && error.contains("700"), "{error}");
    }
}
