//! Storing work inside the caller's transaction.
//!
//! The rule: the message commits or vanishes with the caller's own writes, and a message that could not be read back later is refused
//! before anything is sent. The failure this prevents: the lost and the phantom message of "write, then publish".

use std::collections::HashSet;
use std::time::SystemTime;

use serde::Serialize;
use serde_json::value::{RawValue, to_raw_value};
use tokio_postgres::GenericClient;
use tokio_postgres::types::{Json, Type};
use uuid::Uuid;
use workpump_actors::work::Category;

use crate::commit::{Enqueued, Stored};
use crate::json::{JsonError, check_storable};
use crate::pg::fault::describe;
use crate::pg::schema_name::{BadSchemaName, SchemaName};
use crate::pg::statement::enqueue as statement;
use crate::signal::Channels;

/// Why a batch was not stored. Nothing of it was.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EnqueueError {
    /// One message cannot be stored.
    #[error("message {index} of the batch ({message_id}): {reason}")]
    Invalid {
        /// Its place in the batch, from 0.
        index: usize,
        /// Its id.
        message_id: Uuid,
        /// What is wrong with it.
        reason: InvalidMessage,
    },
    /// The database refused the batch. The caller's transaction is aborted: roll it back.
    #[error("storing the batch failed ({code}): {message}")]
    Database {
        /// The SQLSTATE, or `client` for errors before the server answered.
        code: String,
        /// What the server said.
        message: String,
        /// The driver's error.
        #[source]
        source: tokio_postgres::Error,
    },
}

/// What makes a message impossible to store.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum InvalidMessage {
    /// The all-zero uuid is not a stream.
    #[error("the all-zero uuid is not a stream: leave the stream out for unordered work")]
    NilStream,
    /// A name is empty.
    #[error("{field} is empty")]
    Empty {
        /// Which field.
        field: &'static str,
    },
    /// A name has a NUL character in it.
    #[error("{field} contains a NUL character, which PostgreSQL cannot store")]
    Nul {
        /// Which field.
        field: &'static str,
    },
    /// A body is not JSON.
    #[error("{field} is not JSON: {cause}")]
    NotJson {
        /// Which field.
        field: &'static str,
        /// What the parser said.
        cause: String,
    },
    /// A body is JSON that PostgreSQL cannot store.
    #[error("{field} cannot be stored: {cause}")]
    Json {
        /// Which field.
        field: &'static str,
        /// What is wrong, and where.
        cause: JsonError,
    },
    /// The body is larger than the producer allows.
    #[error(
        "payload and metadata take {bytes} bytes, {limit} are allowed: store large bodies elsewhere and send a reference"
    )]
    TooLarge {
        /// What it takes.
        bytes: usize,
        /// What the producer allows.
        limit: usize,
    },
    /// The same id stands earlier in the same batch.
    #[error("the same message id stands earlier in this batch")]
    Repeated,
}

/// A message for the outbox: to be published, in the order of its stream.
#[derive(Debug, Clone)]
pub struct NewOutbox(Draft);

/// A message for the inbox: to be handled once it is sure that it was never seen before.
#[derive(Debug, Clone)]
pub struct NewInbox(Draft);

#[derive(Debug, Clone)]
struct Draft {
    id: Uuid,
    stream: Option<Uuid>,
    message_type: String,
    name: Option<String>,
    payload: Result<Box<RawValue>, String>,
    metadata: Option<Result<Box<RawValue>, String>>,
    due: Option<SystemTime>,
}

impl Draft {
    fn new(message_type: String, payload: &(impl Serialize + ?Sized)) -> Self {
        Self {
            id: Uuid::now_v7(),
            stream: None,
            message_type,
            name: None,
            payload: to_raw_value(payload).map_err(|error| error.to_string()),
            metadata: None,
            due: None,
        }
    }

    fn check(&self, name_field: &'static str, limit: usize) -> Result<(), InvalidMessage> {
        if self.stream.is_some_and(|stream| stream.is_nil()) {
            return Err(InvalidMessage::NilStream);
        }
        for (field, value) in [("message_type", Some(&self.message_type)), (name_field, self.name.as_ref())] {
            match value {
                Some(text) if text.is_empty() => return Err(InvalidMessage::Empty { field }),
                Some(text) if text.contains('\0') => return Err(InvalidMessage::Nul { field }),
                _ => {}
            }
        }
        let mut bytes = 0;
        for (field, body) in [("payload", Some(&self.payload)), ("metadata", self.metadata.as_ref())] {
            match body {
                Some(Ok(json)) => {
                    bytes += json.get().len();
                    check_storable(json.get()).map_err(|cause| InvalidMessage::Json { field, cause })?;
                }
                Some(Err(cause)) => return Err(InvalidMessage::NotJson { field, cause: cause.clone() }),
                None => {}
            }
        }
        if bytes > limit { Err(InvalidMessage::TooLarge { bytes, limit }) } else { Ok(()) }
    }
}

macro_rules! message_builder {
    ($message:ident, $name:ident, $name_doc:literal) => {
        impl $message {
            /// A message of this type with this payload, under a fresh time-ordered id. A payload that does not serialize is
            /// reported when the message is stored.
            pub fn new(message_type: impl Into<String>, payload: &(impl Serialize + ?Sized)) -> Self {
                Self(Draft::new(message_type.into(), payload))
            }

            /// Use this id instead of a fresh one. Storing the same id again changes nothing.
            #[must_use]
            pub fn id(mut self, id: Uuid) -> Self {
                self.0.id = id;
                self
            }

            /// Order this message after the earlier ones of the same stream. Default: unordered.
            #[must_use]
            pub fn stream(mut self, stream: Uuid) -> Self {
                self.0.stream = Some(stream);
                self
            }

            #[doc = $name_doc]
            #[must_use]
            pub fn $name(mut self, name: impl Into<String>) -> Self {
                self.0.name = Some(name.into());
                self
            }

            /// Anything that should travel beside the payload.
            #[must_use]
            pub fn metadata(mut self, metadata: &(impl Serialize + ?Sized)) -> Self {
                self.0.metadata = Some(to_raw_value(metadata).map_err(|error| error.to_string()));
                self
            }

            /// Not before this time, by the database clock. Later messages of the stream wait behind it. Default: at once.
            #[must_use]
            pub fn scheduled_for(mut self, due: SystemTime) -> Self {
                self.0.due = Some(due);
                self
            }

            /// The id it will be stored under.
            pub fn message_id(&self) -> Uuid {
                self.0.id
            }
        }
    };
}

message_builder!(NewOutbox, destination, "Where the publisher should send it: a topic, a queue, an address.");
message_builder!(NewInbox, handler, "The handler it is meant for, kept in `handler_name`.");

/// Stores messages through any `tokio_postgres` client or transaction, also one that goes through a pooler.
///
/// Two producers may store the same messages in any order within a call. Over several calls of one transaction each keeps what it has
/// stored locked, as with any unique key: transactions that store the same ids in opposite orders can end in a deadlock (SQLSTATE
/// `40P01`) for one of them. Store what belongs together in one call, or repeat the transaction: nothing of it was stored.
///
/// Waking a pump that sleeps is a NOTIFY, which cannot make the commit fail: at most one a transaction, sleeper and category, without
/// data, and none while the server's notification queue is more than half full (then rows wait for the pump's safety poll). A transaction that is
/// to be prepared (two-phase commit) has to `SET LOCAL workpump.skip_doorbells = on`.
///
/// ```no_run
/// # async fn f(client: &mut tokio_postgres::Client) -> Result<(), Box<dyn std::error::Error>> {
/// use workpump::{NewOutbox, Producer};
///
/// let producer = Producer::new("public")?;
/// let transaction = client.transaction().await?;
/// // … the writes that the message is about …
/// let message = NewOutbox::new("order.placed", &serde_json::json!({ "order": 17 })).destination("orders");
/// let enqueued = producer.outbox(&transaction, &[message]).await?;
/// assert!(enqueued.stored[0].is_new);
/// transaction.commit().await?;
/// # Ok(()) }
/// ```
#[derive(Debug, Clone)]
pub struct Producer {
    outbox: String,
    inbox: String,
    channels: Channels,
    max_message_bytes: usize,
}

impl Producer {
    /// The largest message by default: 8 MiB.
    pub const MAX_MESSAGE_BYTES: usize = 8 * 1024 * 1024;

    /// A producer for the pump's tables in this schema.
    pub fn new(schema: &str) -> Result<Self, BadSchemaName> {
        let schema = SchemaName::new(schema)?;
        Ok(Self {
            outbox: statement::outbox(&schema),
            inbox: statement::inbox(&schema),
            channels: Channels::of(&schema),
            max_message_bytes: Self::MAX_MESSAGE_BYTES,
        })
    }

    /// Refuse messages whose payload and metadata take more bytes than this. Default [`Self::MAX_MESSAGE_BYTES`]. 0 refuses all.
    #[must_use]
    pub fn max_message_bytes(mut self, bytes: usize) -> Self {
        self.max_message_bytes = bytes;
        self
    }

    /// Stores messages to be published. One trip, all or nothing, in the order given.
    pub async fn outbox<C: GenericClient + Sync>(
        &self,
        client: &C,
        messages: &[NewOutbox],
    ) -> Result<Enqueued, EnqueueError> {
        let drafts: Vec<&Draft> = messages.iter().map(|message| &message.0).collect();
        self.store(client, Category::Outbox, &drafts).await
    }

    /// Stores messages to be handled. One trip, all or nothing, in the order given; messages seen before are left alone, also when
    /// they were handled long ago.
    pub async fn inbox<C: GenericClient + Sync>(
        &self,
        client: &C,
        messages: &[NewInbox],
    ) -> Result<Enqueued, EnqueueError> {
        let drafts: Vec<&Draft> = messages.iter().map(|message| &message.0).collect();
        self.store(client, Category::Inbox, &drafts).await
    }

    /// Checks a message as [`Self::outbox`] would, without storing it.
    pub fn check_outbox(&self, message: &NewOutbox) -> Result<(), InvalidMessage> {
        message.0.check("destination", self.max_message_bytes)
    }

    pub(crate) fn channels(&self) -> &Channels {
        &self.channels
    }

    async fn store<C: GenericClient + Sync>(
        &self,
        client: &C,
        category: Category,
        drafts: &[&Draft],
    ) -> Result<Enqueued, EnqueueError> {
        let (text, name_field) = match category {
            Category::Inbox => (&self.inbox, "handler"),
            _ => (&self.outbox, "destination"),
        };
        let columns = self.columns(name_field, drafts)?;
        if drafts.is_empty() {
            return Ok(Enqueued::default());
        }
        let rows = client
            .query_typed(
                text,
                &[
                    (&columns.ids, Type::UUID_ARRAY),
                    (&columns.streams, Type::UUID_ARRAY),
                    (&columns.types, Type::TEXT_ARRAY),
                    (&columns.names, Type::TEXT_ARRAY),
                    (&columns.payloads, Type::JSONB_ARRAY),
                    (&columns.metadata, Type::JSONB_ARRAY),
                    (&columns.due, Type::TIMESTAMPTZ_ARRAY),
                    (&columns.places, Type::INT4_ARRAY),
                ],
            )
            .await
            .map_err(refused)?;
        let fresh =
            rows.iter().map(|row| row.try_get(0)).collect::<Result<HashSet<Uuid>, _>>().map_err(refused)?;
        let stored = drafts.iter().map(|draft| Stored {
            message_id: draft.id,
            category,
            is_new: fresh.contains(&draft.id),
        });
        Ok(Enqueued { stored: stored.collect() })
    }

    fn columns<'a>(
        &self,
        name_field: &'static str,
        drafts: &[&'a Draft],
    ) -> Result<Columns<'a>, EnqueueError> {
        let mut columns = Columns::default();
        let mut seen = HashSet::with_capacity(drafts.len());
        for (index, draft) in drafts.iter().enumerate() {
            let invalid = |reason| EnqueueError::Invalid { index, message_id: draft.id, reason };
            draft.check(name_field, self.max_message_bytes).map_err(invalid)?;
            if !seen.insert(draft.id) {
                return Err(invalid(InvalidMessage::Repeated));
            }
        }
        let mut by_id: Vec<(i32, &Draft)> = (1..).zip(drafts.iter().copied()).collect();
        by_id.sort_unstable_by_key(|(_, draft)| draft.id);
        for (place, draft) in by_id {
            let Ok(payload) = &draft.payload else { continue };
            columns.ids.push(draft.id);
            columns.streams.push(draft.stream);
            columns.types.push(&draft.message_type);
            columns.names.push(draft.name.as_deref());
            columns.payloads.push(Json(payload));
            columns
                .metadata
                .push(draft.metadata.as_ref().and_then(|metadata| metadata.as_deref().ok()).map(Json));
            columns.due.push(draft.due);
            columns.places.push(place);
        }
        Ok(columns)
    }
}

#[derive(Default)]
struct Columns<'a> {
    ids: Vec<Uuid>,
    streams: Vec<Option<Uuid>>,
    types: Vec<&'a str>,
    names: Vec<Option<&'a str>>,
    payloads: Vec<Json<&'a RawValue>>,
    metadata: Vec<Option<Json<&'a RawValue>>>,
    due: Vec<Option<SystemTime>>,
    places: Vec<i32>,
}

fn refused(source: tokio_postgres::Error) -> EnqueueError {
    EnqueueError::Database {
        code: source.code().map_or_else(|| "client".to_owned(), |code| code.code().to_owned()),
        message: describe(&source),
        source,
    }
}
