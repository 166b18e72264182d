//! What can go wrong with a tree as a whole.

use super::{Exit, InvalidPolicy, Name};

/// A child did not come up, so nothing did.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum StartFailed {
    /// A child ended or was not ready in time.
    #[error("{child} did not start: {cause}")]
    Child {
        /// Which one.
        child: Name,
        /// The last thing known about why.
        cause: String,
    },
    /// Two children of a tree have the same name.
    #[error("there is already a child called {0}: give every child of a tree its own name")]
    DuplicateName(Name),
    /// Two children provide the same message.
    #[error("both {first} and {second} provide {message}: let one of them, and reach the other by its name")]
    DuplicateProvider {
        /// The message type.
        message: &'static str,
        /// Who provides it.
        first: Name,
        /// And who else.
        second: Name,
    },
    /// The policy of a child cannot work.
    #[error("the restart policy of {child} cannot work: {policy}")]
    Policy {
        /// Which child.
        child: Name,
        /// Why.
        policy: InvalidPolicy,
    },
    /// Rest-for-one needs an order.
    #[error(
        "{0} starts its children in parallel, so none comes after another: use one-for-one or one-for-all"
    )]
    NoOrder(Name),
    /// There is no such group, or it is not running.
    #[error("there is no running group called {0}")]
    NoSuchGroup(Name),
    /// There is no such child.
    #[error("there is no child called {0}")]
    NoSuchChild(Name),
    /// It has ended for good, and its address with it.
    #[error("{0} has ended for good: remove it, and add it again")]
    Over(Name),
    /// The tree has ended.
    #[error("the tree of {0} has ended")]
    Ended(Name),
}

/// A child died too often, and its group was stopped.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[error("{child} was given up after {restarts} restarts: {exit}")]
pub struct GaveUp {
    /// Which one.
    pub child: Name,
    /// How many restarts were tried inside the window.
    pub restarts: u32,
    /// How its last life ended.
    pub exit: Exit,
}

/// Nobody of this kind is in the registry.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Unknown {
    /// No child is of this type, or has this name.
    #[error("no child of the registry is {0}")]
    Nobody(String),
    /// Several children are of this type.
    #[error("several children are of type {actor}: ask for one by name ({names})")]
    Several {
        /// The actor type.
        actor: &'static str,
        /// Their names.
        names: String,
    },
}
